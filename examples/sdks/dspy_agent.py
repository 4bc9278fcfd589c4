"""DSPy: a module that calls a tool and then answers. Its cache must be off."""

import dspy
from dspy.utils.exceptions import AdapterParseError
from sums import SYSTEM, calculator, grade


class Plain(dspy.ChatAdapter):
    """The question as it is, and the whole text as the answer: a tiny model knows no headings."""

    def format_system_message(self, signature):
        return signature.instructions

    def format_user_message_content(self, signature, inputs, *args, **kwargs):
        return "\n".join(str(inputs[name]) for name in signature.input_fields)

    def parse(self, signature, completion):
        return dict.fromkeys(signature.output_fields, completion)


class Caller(dspy.LM):
    """A model that takes tools, which DSPy cannot know of a model it has never heard of."""

    supports_function_calling = True


class Solver(dspy.Module):
    """Asks with the calculator at hand, and once more with what it gave."""

    def __init__(self):
        super().__init__()
        call = "question, tools: list[dspy.Tool] -> answer, calls: dspy.ToolCalls"
        self.call = dspy.Predict(dspy.Signature(call, SYSTEM))
        self.answer = dspy.Predict(dspy.Signature("question, results -> answer", SYSTEM))

    async def aforward(self, question):
        tool = dspy.Tool(calculator)
        reply = await self.call.acall(question=question, tools=[tool])
        calls = [call.args for call in (reply.calls.tool_calls if reply.calls else [])]
        results = [calculator(**args) for args in calls if args.keys() == {"expression"}]
        if results:
            reply = await self.answer.acall(question=question, results=" ".join(results))
        return dspy.Prediction(answer=reply.answer, results=results)


async def solve(task, llm):
    # whet: begin
    lm = Caller(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key, cache=False)
    # whet: end
    adapter = Plain(use_native_function_calling=True, use_json_adapter_fallback=False)
    with dspy.context(lm=lm, adapter=adapter):
        try:
            reply = await ask(Solver(), task)
        except AdapterParseError:  # an empty reply
            return 0.0
    return grade(reply.answer, task, has_calculated=bool(reply.results))


async def ask(solver, task):
    if not task.get("stream"):
        return await solver.acall(question=task["question"])
    parts = dspy.streamify(solver, is_async_program=True)(question=task["question"])
    return [part async for part in parts][-1]
