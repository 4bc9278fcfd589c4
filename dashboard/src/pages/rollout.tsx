import { runPath, type Attempt, type AttemptRecord, type Call, type Credit, type Message, type Reward, type Row } from "../api";
import { href, setQuery, useRoute } from "../route";
import { Empty, Fault, Gone, LongText, Status, duration, number, text, useGet, useLive } from "../ui";
import { Graph } from "./graph";
import { Spans } from "./spans";
import { Tokens } from "./tokens";

const VIEWS = ["conversation", "tokens", "graph", "spans"] as const;

export function Rollout({ run, id }: { run: string; id: string }) {
  const { query } = useRoute();
  const rollout = useGet<{ rollout: Row; attempts: AttemptRecord[] }>(runPath(run, `/rollouts/${encodeURIComponent(id)}`));
  const attempts = rollout.data?.attempts ?? [];
  const chosen = attempts.find((a) => a.id === query.get("attempt")) ?? attempts[attempts.length - 1];
  const path = chosen ? runPath(run, `/attempts/${encodeURIComponent(chosen.id)}`) : null;
  const attempt = useGet<Attempt>(path);
  const credit = useGet<Credit>(path && `${path}/credit`);
  const gone = useLive(run, () => {
    if (chosen?.status === "running" || !chosen) { rollout.reload(); attempt.reload(); }
  });
  const view = VIEWS.find((v) => v === query.get("view")) ?? "conversation";
  if (rollout.error && !rollout.data) return <Fault error={rollout.error} />;
  if (!rollout.data) return <Empty>loading…</Empty>;
  const row = rollout.data.rollout;
  const data = attempt.data?.attempt.id === chosen?.id ? attempt.data : null;
  const sampled = data?.calls.reduce((n, c) => n + c.generations.reduce((m, g) => m + g.ids.length, 0), 0);
  return (
    <section>
      <Gone gone={gone} run={run} />
      <h1 class="mono">{row.id}</h1>
      <div class="facts">
        <Status value={row.status} />
        <span>reward <b class="num">{number(row.reward)}</b></span>
        {credit.data && !credit.data.reason && <span>advantage <b class="num">{advantageText(credit.data)}</b></span>}
        <span>step {row.step ? <a href={href(["r", run, "rollouts"], { step: row.step })}>{row.step}</a> : "–"}</span>
        <span>group <a class="mono" href={href(["r", run, "rollouts"], { group: row.group, order: "best" })}>{row.group}</a></span>
        <span><a href={href(["r", run, "rollouts"], { task: row.id, order: "oldest" })}>same task over steps</a></span>
        <span class="muted">{row.mode === "val" ? "evaluation" : row.mode}</span>
        {data && <span class="muted">{plural(data.calls.length, "call")}, {number(sampled)} sampled tokens, {duration(row.seconds)}</span>}
        {row.pruned && <span class="bad">its calls were pruned</span>}
      </div>
      <Attempts attempts={attempts} chosen={chosen?.id} />
      {chosen?.failure && <FailureBox attempt={chosen} />}
      <div class="beside">
        <div class="task"><LongText mono value={text(row.task)} lines={12} /></div>
        <Rewards rewards={data?.rewards ?? []} final={chosen?.reward ?? null} calls={data?.calls ?? []} />
      </div>
      <div class="tabs" role="group" aria-label="views of the attempt">
        {VIEWS.map((v) => <button key={v} aria-pressed={v === view} onClick={() => setQuery({ view: v === "conversation" ? null : v })}>{v}{v === "spans" && data ? ` (${data.spans.length})` : ""}{v === "graph" && data ? ` (${plural(data.calls.filter((c) => c.fork).length, "fork")})` : ""}</button>)}
      </div>
      {attempt.error && !data && <Fault error={attempt.error} />}
      {data && data.calls.length === 0 && view !== "spans" && <Empty>No model call was recorded.</Empty>}
      {data && data.calls.length > 0 && view === "conversation" && <Conversation calls={data.calls} rewards={data.rewards} credit={credit.data} />}
      {data && data.calls.length > 0 && view === "tokens" && <Tokens attempt={data} credit={credit.data} />}
      {data && data.calls.length > 0 && view === "graph" && <Graph calls={data.calls} credit={credit.data} />}
      {data && view === "spans" && <Spans spans={data.spans} calls={data.calls} />}
      <p class="muted small">in the terminal: <code>whet show {run} --rollout {row.id}</code></p>
    </section>
  );
}

function plural(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function advantageText(credit: Credit): string {
  const values = Object.values(credit.advantages).flat();
  if (!values.length) return "–";
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  return `${mean >= 0 ? "+" : ""}${number(mean)}`;
}

function Attempts({ attempts, chosen }: { attempts: AttemptRecord[]; chosen?: string }) {
  if (attempts.length < 2) return null;
  return (
    <div class="tabs" role="group" aria-label="attempts">
      {attempts.map((a) => (
        <button key={a.id} aria-pressed={a.id === chosen} onClick={() => setQuery({ attempt: a.id })}>
          attempt {a.number}: {a.failure ? a.failure.kind : a.status}
        </button>
      ))}
    </div>
  );
}

function FailureBox({ attempt }: { attempt: AttemptRecord }) {
  const failure = attempt.failure!;
  return (
    <div class="failure" role="note">
      <p><b>{failure.kind}</b> {failure.message}</p>
      <p class="muted small">worker {attempt.worker}, {duration((attempt.ended ?? attempt.started) - attempt.started)}{attempt.late.length > 0 && `, ${attempt.late.length} late reports`}</p>
      {failure.traceback && <LongText mono value={failure.traceback} lines={30} />}
    </div>
  );
}

function targetText(reward: Reward, calls: Call[]): string {
  const target = reward.target;
  if (!target) return "the attempt";
  const parts: string[] = [];
  if (target.call !== null) parts.push(`call ${calls.findIndex((c) => c.id === target.call) + 1 || target.call}`);
  if (target.turn !== null) parts.push(`turn ${target.turn}`);
  if (target.agent !== null) parts.push(`agent ${target.agent}`);
  return parts.join(", ");
}

function Rewards({ rewards, final, calls }: { rewards: Reward[]; final: number | null; calls: Call[] }) {
  if (!rewards.length) return null;
  return (
    <table class="compact narrow">
      <thead><tr><th>reward</th><th>for</th><th class="r">value</th></tr></thead>
      <tbody>
        {rewards.map((r, n) => <tr key={n}><td>{r.key}</td><td class="muted">{targetText(r, calls)}</td><td class="r num">{number(r.value)}</td></tr>)}
        {final !== null && <tr><td><b>returned</b></td><td class="muted">the attempt</td><td class="r num"><b>{number(final)}</b></td></tr>}
      </tbody>
    </table>
  );
}

function Conversation({ calls, rewards, credit }: { calls: Call[]; rewards: Reward[]; credit: Credit | null }) {
  const trained = new Set(credit?.trained ?? []);
  return (
    <ol class="conversation">
      {calls.map((call, n) => (
        <li key={call.id} id={`call-${n + 1}`} class="call">
          <header>
            <b>call {n + 1}</b>
            {call.agent && <span class="badge">{call.agent}</span>}
            {call.policy && <span class="badge">policy {call.policy}</span>}
            <span class="muted small">{call.model || "policy"}, prompt {number(call.prompt_length)} tokens, {number(call.context.ids.length)} new</span>
            {call.fork && <span class="badge fork" title={call.cause ?? ""}>fork: {call.fork.replace(/_/g, " ")} <span class="cause">({call.cause})</span></span>}
            {call.lossy && <span class="badge fork">an echoed turn had lost text</span>}
            {rewards.filter((r) => r.target?.call === call.id).map((r, i) => <span key={i} class="badge">{r.key} {number(r.value)}</span>)}
          </header>
          {call.messages.map((message, i) => <MessageBox key={i} message={message} />)}
          {call.generations.map((g, i) => {
            const id = `${call.id}.${i}`;
            return <MessageBox key={id} message={{ role: "assistant", ...g.message }} sampled={`${g.ids.length} tokens${g.stop === "length" ? ", cut off" : ""}`} note={credit?.unselected[id] ?? (credit && !credit.reason ? (trained.has(id) ? "trained" : "not trained") : undefined)} />;
          })}
        </li>
      ))}
    </ol>
  );
}

function MessageBox({ message, sampled, note }: { message: Message; sampled?: string; note?: string }) {
  const tools = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  return (
    <div class={sampled ? "message sampled" : "message"}>
      <div class="role">{text(message.role)}{sampled && <span class="muted small">{sampled}</span>}{note && <span class="muted small">{note}</span>}</div>
      <div class="body">
        {message.reasoning ? <div class="reasoning"><LongText value={text(message.reasoning)} /></div> : null}
        {message.content ? <LongText value={text(message.content)} mono={message.role === "tool"} /> : null}
        {tools.map((tool, i) => <div key={i} class="tool mono"><b>{text(tool.name)}</b> {text(tool.arguments)}</div>)}
        {!message.content && !message.reasoning && tools.length === 0 && <span class="muted">empty</span>}
      </div>
    </div>
  );
}
