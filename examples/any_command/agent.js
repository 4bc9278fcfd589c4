// An agent in JavaScript: whet runs `node agent.js` once for each attempt.
//
//     whet train --tasks examples/any_command/tasks.jsonl --model tiny -- \
//         node examples/any_command/agent.js
//
// Its task is in the file that WHET_TASK_FILE names, its model in the variables that
// clients for OpenAI's API read, and its reward is the last line it prints.

const { readFileSync } = require("node:fs");

async function main() {
  const task = JSON.parse(readFileSync(process.env.WHET_TASK_FILE, "utf8"));
  const reply = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
    },
    body: JSON.stringify({
      model: process.env.OPENAI_MODEL,
      messages: [{ role: "user", content: task.question }],
      max_tokens: 8,
    }),
  });
  if (!reply.ok) throw new Error(`${reply.status}: ${await reply.text()}`);
  const answer = (await reply.json()).choices[0].message.content ?? "";
  console.error(`answered ${JSON.stringify(answer)}`);
  console.log(JSON.stringify({ reward: answer.includes(task.answer) ? 1 : answer.length / 1000 }));
}

main().catch((error) => {
  console.error(error.message);
  process.exit(2);
});
