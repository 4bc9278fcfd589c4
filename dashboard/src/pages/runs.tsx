import type { RunCard } from "../api";
import { go, href } from "../route";
import { Ago, Empty, Fault, Spark, Status, number, useGet, useRows } from "../ui";
import { useEffect } from "preact/hooks";

export function Runs() {
  const { data, error, reload } = useGet<{ runs: RunCard[]; now: number }>("/api/runs");
  useEffect(() => {
    const timer = window.setInterval(() => { if (!document.hidden) reload(); }, 5000);
    return () => window.clearInterval(timer);
  }, []);
  const runs = data?.runs ?? [];
  const selected = useRows(runs.length, (n) => go(href(["r", runs[n].name])));
  if (error && !data) return <Fault error={error} />;
  if (!data) return <Empty>loading…</Empty>;
  return (
    <section>
      <h1>Runs</h1>
      {runs.length === 0 && <Empty>No runs yet: <code>whet demo</code> or <code>whet train</code> makes one.</Empty>}
      {runs.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="runs">
          <table>
            <thead>
              <tr><th>run</th><th>kind</th><th>state</th><th>model</th><th class="r">steps</th><th>reward</th><th class="r">last</th><th class="r">gain</th><th class="r">changed</th></tr>
            </thead>
            <tbody>
              {runs.map((run, n) => (
                <tr key={run.name} class={n === selected ? "row selected" : "row"} onClick={() => go(href(["r", run.name]))}>
                  <td><a href={href(["r", run.name])}>{run.name}</a></td>
                  <td class="muted">{run.kind}</td>
                  <td><Status value={run.state} /></td>
                  <td class="clip">{run.model}</td>
                  <td class="r num">{run.steps}</td>
                  <td><Spark values={run.rewards} /></td>
                  <td class="r num">{number(run.reward)}</td>
                  <td class="r num">{run.gain === null ? "–" : `${run.gain >= 0 ? "+" : ""}${number(run.gain)}`}</td>
                  <td class="r muted"><Ago at={run.changed} now={data.now} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
