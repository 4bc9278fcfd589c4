import { runPath } from "../api";
import { Empty, Fault, Tile, number, useGet, useLive } from "../ui";

type Counts = Record<string, number | null | Record<string, number>>;
type Doctor = { counts: Counts; is_all: boolean; model: string; template: string | null };
/** Counts of what was not trained as it was sampled: none is best. */
const LOSSES: [string, string][] = [["unproven", "generations without proof of their context"], ["constrained", "generations sampled under a grammar"], ["lossy_echoes", "turns that the agent sent back with less text"]];
const TABLES: [string, string][] = [["forks", "Forks by cause"], ["unselected", "Generations left out of training"], ["omitted_by_template", "Parts that the template leaves out"], ["without_token_ids", "Calls that bypassed the gateway"]];

export function DoctorPage({ run }: { run: string }) {
  const { data, error, reload } = useGet<Doctor>(runPath(run, "/doctor"));
  useLive(run, reload);
  if (error && !data) return <Fault error={error} />;
  if (!data) return <Empty>loading…</Empty>;
  const value = (name: string) => data.counts[name] as number | null;
  const lost = LOSSES.filter(([name]) => (value(name) ?? 0) > 0);
  const tables = TABLES.map(([name, title]) => [title, Object.entries((data.counts[name] ?? {}) as Record<string, number>)] as const).filter(([, rows]) => rows.length > 0);
  return (
    <section>
      <h1>Doctor</h1>
      <div class="tiles">
        <Tile name="rollouts" value={number(value("rollouts"))} note={data.is_all ? "all that succeeded" : "the newest that succeeded"} />
        <Tile name="calls per row" value={number(value("calls_per_row"))} note={`${number(value("calls"))} calls, ${number(value("rows"))} rows`} />
        <Tile name="prompt tokens" value={number(value("prompt_tokens_served"))} note={`${number(value("row_tokens"))} tokens to train`} />
        <Tile name="sampled tokens" value={number(value("sampled_tokens"))} note={`${number(value("tokens_stored"))} tokens stored`} />
        <Tile name="log-prob gap" value={number(value("logprob_gap"))} note="trainer to sampler, mean of all steps" />
      </div>
      {value("rollouts") === 0 ? <Empty>No rollout has succeeded yet.</Empty> : lost.length > 0 ? (
        <ul class="alarms">{lost.map(([name, what]) => <li key={name}><b>{number(value(name))} {what}</b></li>)}</ul>
      ) : <p class="good">Every sampled token that training uses is proven to be what was sampled, in the context that was served.</p>}
      {tables.map(([title, rows]) => (
        <div key={title}>
          <h2>{title}</h2>
          <table class="compact narrow"><tbody>{rows.map(([name, count]) => <tr key={name}><td>{name.replace(/_/g, " ")}</td><td class="r num">{number(count)}</td></tr>)}</tbody></table>
        </div>
      ))}
      <h2>Chat template{data.model && <span class="muted"> of {data.model}</span>}</h2>
      {data.template ? <pre class="report mono" tabIndex={0} role="region" aria-label="report on the chat template">{data.template}</pre> : <p class="muted">The tokenizer of the model is not on this machine.</p>}
      <p class="muted small">in the terminal, of all rollouts: <code>whet doctor --run {run}</code></p>
    </section>
  );
}
