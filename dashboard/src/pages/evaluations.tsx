import { useState } from "preact/hooks";
import { runPath } from "../api";
import { href, setQuery, useRoute } from "../route";
import { Empty, Fault, number, useGet } from "../ui";

/** One rollout of a task, with its id if it has a page. */
type Try = { rollout: string | null; reward: number | null; status: string };
type Task = { task: number; text: string; sides: Record<string, { greedy: Try[]; sampled: Try[] }> };
type Data = { sides: { name: string; rollouts: number; failed: number; greedy: number | null; sampled: number | null }[]; tasks: Task[] };
const PAGE = 100;

function score(task: Task, side: string): number | null {
  const found = task.sides[side];
  const values = (found?.greedy.length ? found.greedy : found?.sampled ?? []).map((t) => t.reward).filter((v): v is number => v !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

export function Evaluations({ run }: { run: string }) {
  const { query } = useRoute();
  const { data, error } = useGet<Data>(runPath(run, "/evaluations"));
  const [shown, setShown] = useState(PAGE);
  if (error && !data) return <Fault error={error} />;
  if (!data) return <Empty>loading…</Empty>;
  if (!data.sides.length) return <Empty>No evaluation: give held-out tasks with <code>--held-out</code>.</Empty>;
  const names = data.sides.map((s) => s.name);
  const a = names.includes(query.get("a") ?? "") ? query.get("a")! : names[0];
  const b = names.includes(query.get("b") ?? "") ? query.get("b")! : names[names.length - 1];
  const only = query.get("only") ?? "all";
  const judged = data.tasks.map((task) => {
    const before = score(task, a), after = score(task, b);
    const verdict = before === null || after === null ? "missing" : after > before ? "won" : after < before ? "lost" : "same";
    return { task, before, after, verdict };
  });
  const count = (v: string) => judged.filter((j) => j.verdict === v).length;
  const listed = judged.filter((j) => only === "all" || j.verdict === only);
  return (
    <section>
      <h1>Evaluations</h1>
      <div class="scroll" tabIndex={0} role="region" aria-label="evaluations">
        <table class="compact narrow">
          <thead><tr><th>evaluation</th><th class="r">greedy</th><th class="r">sampled</th><th class="r">rollouts</th><th class="r">failed</th></tr></thead>
          <tbody>{data.sides.map((s) => <tr key={s.name}><td>{s.name}</td><td class="r num">{number(s.greedy)}</td><td class="r num">{number(s.sampled)}</td><td class="r num">{s.rollouts}</td><td class="r num">{s.failed}</td></tr>)}</tbody>
        </table>
      </div>
      {names.length > 1 && (
        <>
          <div class="bar">
            <label class="field"><span>compare</span><select value={a} onChange={(e) => setQuery({ a: e.currentTarget.value })}>{names.map((n) => <option key={n}>{n}</option>)}</select></label>
            <label class="field"><span>with</span><select value={b} onChange={(e) => setQuery({ b: e.currentTarget.value })}>{names.map((n) => <option key={n}>{n}</option>)}</select></label>
            <div class="segmented" role="group" aria-label="tasks">
              {["all", "won", "lost", "same", "missing"].map((v) => <button key={v} aria-pressed={v === only} onClick={() => { setShown(PAGE); setQuery({ only: v === "all" ? null : v }); }}>{v} {v === "all" ? judged.length : count(v)}</button>)}
            </div>
          </div>
          <div class="scroll" tabIndex={0} role="region" aria-label="tasks">
            <table class="compact">
              <thead><tr><th class="r">task</th><th>{a}</th><th>{b}</th><th>result</th><th>text</th></tr></thead>
              <tbody>{listed.slice(0, shown).map(({ task, verdict }) => (
                <tr key={task.task}><td class="r num">{task.task}</td><td><Tries run={run} task={task} side={a} /></td><td><Tries run={run} task={task} side={b} /></td><td><span class={`verdict ${verdict}`}>{verdict}</span></td><td class="excerpt">{task.text}</td></tr>
              ))}</tbody>
            </table>
          </div>
          {listed.length > shown && <button class="more" onClick={() => setShown(shown + PAGE)}>{listed.length - shown} more</button>}
        </>
      )}
    </section>
  );
}

function Tries({ run, task, side }: { run: string; task: Task; side: string }) {
  const found = task.sides[side];
  if (!found) return <span class="muted">–</span>;
  return (
    <span class="tries">
      {[...found.greedy, ...found.sampled].map((t, n) => (
        <a key={n} href={t.rollout === null ? undefined : href(["r", run, "rollouts", t.rollout])} class={n < found.greedy.length ? "try greedy" : "try"} title={`${n < found.greedy.length ? "greedy" : "sampled"}: ${t.status === "failed" ? "failed" : number(t.reward)}`}>{t.status === "failed" ? "×" : number(t.reward, 2)}</a>
      ))}
    </span>
  );
}
