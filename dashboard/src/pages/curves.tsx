import { useEffect, useState } from "preact/hooks";
import { get, isStatic, runPath, type Run, type RunCard, type Steps } from "../api";
import { Chart, type Series } from "../chart";
import { href, setQuery, useRoute } from "../route";
import { Empty, Fault, Gone, Tile, duration, number, useGet, useLive } from "../ui";

type Panel = { title: string; unit?: string; metrics: [string, string][]; note?: string };

const PANELS: Panel[] = [
  { title: "Reward", metrics: [["reward", "mean"]] },
  { title: "Accuracy on held-out tasks", metrics: [["eval/greedy", "greedy"], ["eval/sampled", "sampled"]], note: "evaluation.every evaluates during training" },
  { title: "Reward spread", metrics: [["reward_std", "std"]] },
  { title: "Log-prob gap", unit: "nats", metrics: [["logprob_gap", "gap"], ["mismatch_kl", "KL"]] },
  { title: "Entropy", unit: "nats", metrics: [["entropy", "entropy"]] },
  { title: "Staleness", unit: "updates", metrics: [["staleness", "mean"], ["staleness_max", "max"]] },
  { title: "Throughput", unit: "sampled tokens / s", metrics: [["throughput", "tokens / s"]] },
  { title: "Tokens", metrics: [["sampled_tokens", "sampled"], ["trained_tokens", "trained"]] },
  { title: "Rollouts without use", metrics: [["failed_rollouts", "failed"], ["silent", "in silent groups"]] },
  { title: "Gradient norm", metrics: [["grad_norm", "norm"]] },
];
const PHASES = ["collect", "train", "credit", "publish", "save", "evaluate"];

type Axis = "step" | "time" | "tokens";

export function Curves({ run }: { run: string }) {
  const { query } = useRoute();
  const info = useGet<Run>(runPath(run));
  const steps = useGet<Steps>(runPath(run, "/steps"));
  const gone = useLive(run, () => { info.reload(); steps.reload(); });
  const names = (query.get("with") ?? "").split(",").filter(Boolean);
  const others = useOthers(names);
  const axis = (query.get("x") ?? "step") as Axis;
  const smoothing = Number(query.get("smooth") ?? 0);
  if (info.error && !info.data) return <Fault error={info.error} />;
  if (!info.data || !steps.data) return <Empty>loading…</Empty>;
  const all: [string, Steps][] = [[run, steps.data], ...others];
  const shown = all.map(([name, data]) => [name, withDerived(data)] as const);
  return (
    <section>
      <Gone gone={gone} run={run} />
      <Tiles run={info.data} steps={steps.data} />
      {info.data.alarms.length > 0 && (
        <ul class="alarms" aria-label="alarms">
          {info.data.alarms.map((alarm) => (
            <li key={alarm.metric}><b>{alarm.message}</b> <span class="muted">{alarm.metric} {number(alarm.value)} at step {alarm.step}</span></li>
          ))}
        </ul>
      )}
      <div class="bar">
        <Choice label="x axis" value={axis} options={["step", "time", "tokens"]} onChange={(x) => setQuery({ x: x === "step" ? null : x })} />
        <Choice label="smoothing" value={String(smoothing)} options={["0", "5", "15"]} names={["none", "5 steps", "15 steps"]} onChange={(v) => setQuery({ smooth: v === "0" ? null : v })} />
        {!isStatic && <Compare run={run} chosen={names} />}
      </div>
      {steps.data.step.length === 0 && <Empty>No step has finished yet.</Empty>}
      <div class="charts">
        {PANELS.map((panel) => (
          <Chart key={panel.title} title={panel.title} unit={panel.unit} xName={axis} smoothing={smoothing} note={panel.note} series={panelSeries(panel, shown, axis)} />
        ))}
        <Chart title="Time by phase" unit="s per step" xName="step" stacked series={phaseSeries(shown[0][1])} />
      </div>
      {shown.length === 1 && <AllMetrics steps={shown[0][1]} axis={axis} smoothing={smoothing} />}
      <Config run={info.data} names={names} />
    </section>
  );
}

function useOthers(names: string[]): [string, Steps][] {
  const [found, setFound] = useState<[string, Steps][]>([]);
  const key = names.join(",");
  useEffect(() => {
    let wanted = true;
    Promise.all(names.map(async (name) => [name, await get<Steps>(runPath(name, "/steps")).catch(() => null)] as const)).then((all) => {
      if (wanted) setFound(all.filter((pair): pair is [string, Steps] => pair[1] !== null));
    });
    return () => { wanted = false; };
  }, [key]);
  return found.filter(([name]) => names.includes(name));
}

function withDerived(steps: Steps): Steps {
  const metrics = { ...steps.metrics };
  const sampled = metrics.sampled_tokens ?? [], seconds = metrics.step_seconds ?? [];
  metrics.throughput = steps.step.map((_, i) => (sampled[i] && seconds[i] ? sampled[i]! / seconds[i]! : null));
  const silent = metrics.zero_signal_fraction ?? [];
  metrics.silent = steps.step.map((_, i) => (silent[i] === null || silent[i] === undefined ? null : Math.round(silent[i]! * steps.rollouts[i])));
  return { ...steps, metrics };
}

function xValues(steps: Steps, axis: Axis): number[] {
  if (axis === "step") return steps.step;
  const column = steps.metrics[axis === "time" ? "step_seconds" : "sampled_tokens"] ?? [];
  let sum = 0;
  return steps.step.map((_, i) => (sum += column[i] ?? 0)).map((v) => (axis === "time" ? Math.round(v) : v));
}

/** The metrics of a panel; in a run of several policies also those of each, by its name. */
function panelMetrics(panel: Panel, steps: Steps): [string, string][] {
  const policies = Object.keys(steps.metrics).filter((name) => name.endsWith("/version")).map((name) => name.slice(0, -"/version".length));
  return [...panel.metrics, ...policies.flatMap((policy) => panel.metrics.map(([metric, title]): [string, string] => [`${policy}/${metric}`, panel.metrics.length > 1 ? `${policy} ${title}` : policy]))];
}

function panelSeries(panel: Panel, runs: readonly (readonly [string, Steps])[], axis: Axis): Series[] {
  const series: Series[] = [];
  runs.forEach(([name, steps], n) => {
    const metrics = panelMetrics(panel, steps);
    metrics.forEach(([metric, title], m) => {
      const ys = steps.metrics[metric];
      if (!ys || ys.every((y) => y === null)) return;
      const label = runs.length > 1 ? (metrics.length > 1 ? `${name} ${title}` : name) : title;
      series.push({ name: label, xs: xValues(steps, axis), ys, color: runs.length > 1 ? n : m, dashed: runs.length > 1 && m > 0, joined: metric.startsWith("eval/") });
    });
  });
  return series;
}

function phaseSeries(steps: Steps): Series[] {
  return PHASES.map((phase, n) => ({ name: phase, xs: steps.step, ys: steps.metrics[`${phase}_seconds`] ?? [], color: n }))
    .filter((s) => total(s.ys) > 0.01 * total(steps.metrics.step_seconds ?? []));
}

function total(values: (number | null)[]): number {
  return values.reduce((sum: number, value) => sum + (value ?? 0), 0);
}

function Tiles({ run, steps }: { run: Run; steps: Steps }) {
  const rewards = (steps.metrics.reward ?? []).filter((v): v is number => v !== null);
  const last = rewards[rewards.length - 1] ?? null;
  const train = run.statuses.train ?? {};
  const planned = Number(run.config?.steps ?? 0);
  const seconds = (steps.metrics.step_seconds ?? []).reduce((a: number, b) => a + (b ?? 0), 0);
  const tokens = (steps.metrics.sampled_tokens ?? []).reduce((a: number, b) => a + (b ?? 0), 0);
  const left = run.state === "running" && steps.step.length ? (planned - steps.step.length) * (seconds / steps.step.length) : null;
  const before = (run.report?.before as Record<string, number | null> | null)?.greedy, after = (run.report?.after as Record<string, number | null> | null)?.greedy;
  return (
    <div class="tiles">
      <Tile name="reward" value={number(last)} note={rewards.length > 1 ? `from ${number(rewards[0])} at the first step` : ""} />
      <Tile name="gain on held-out tasks" value={run.gain === null ? "–" : `${run.gain >= 0 ? "+" : ""}${number(run.gain)}`} note={before !== undefined && after !== undefined ? `${number(before)} → ${number(after)}` : "after the last step"} />
      <Tile name="steps" value={planned ? `${run.steps} / ${planned}` : String(run.steps)} note={left === null ? duration(seconds) : `about ${duration(left)} left`} />
      <Tile name="rollouts" value={number(train.succeeded ?? 0)} note={<a href={href(["r", run.name, "rollouts"], { status: "failed" })}>{train.failed ?? 0} failed</a>} />
      <Tile name="sampled tokens" value={number(tokens)} note={seconds ? `${number(tokens / seconds)} a second` : ""} />
    </div>
  );
}

function Choice({ label, value, options, names, onChange }: { label: string; value: string; options: string[]; names?: string[]; onChange: (value: string) => void }) {
  return (
    <label class="field">
      <span>{label}</span>
      <select value={value} onChange={(e) => onChange(e.currentTarget.value)}>
        {options.map((o, n) => <option key={o} value={o}>{names?.[n] ?? o}</option>)}
      </select>
    </label>
  );
}

function Compare({ run, chosen }: { run: string; chosen: string[] }) {
  const { data } = useGet<{ runs: RunCard[] }>("/api/runs");
  const others = (data?.runs ?? []).filter((card) => card.name !== run && card.steps > 0);
  if (!others.length) return null;
  const toggle = (name: string) => {
    const next = chosen.includes(name) ? chosen.filter((n) => n !== name) : [...chosen, name];
    setQuery({ with: next.join(",") || null });
  };
  return (
    <details class="menu">
      <summary>compare{chosen.length > 0 && ` (${chosen.length})`}</summary>
      <div class="menu-list">
        {others.slice(0, 50).map((card) => (
          <label key={card.name}><input type="checkbox" checked={chosen.includes(card.name)} onChange={() => toggle(card.name)} /> {card.name}</label>
        ))}
      </div>
    </details>
  );
}

function AllMetrics({ steps, axis, smoothing }: { steps: Steps; axis: Axis; smoothing: number }) {
  const [open, setOpen] = useState(false);
  const shown = new Set(PANELS.flatMap((p) => p.metrics.map((m) => m[0])));
  const names = Object.keys(steps.metrics).filter((n) => !shown.has(n) && steps.metrics[n].some((v) => v !== null)).sort();
  if (!names.length) return null;
  return (
    <details onToggle={(e) => setOpen(e.currentTarget.open)}>
      <summary>{names.length} more metrics</summary>
      {open && (
        <div class="charts">
          {names.map((name) => <Chart key={name} title={name} xName={axis} smoothing={smoothing} series={[{ name, xs: xValues(steps, axis), ys: steps.metrics[name], color: 0 }]} />)}
        </div>
      )}
    </details>
  );
}

function leaves(value: unknown, prefix = ""): [string, string][] {
  if (value && typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).flatMap(([key, below]) => leaves(below, prefix ? `${prefix}.${key}` : key));
  }
  return [[prefix, JSON.stringify(value)]];
}

/** The config; next to those of other runs only the keys that differ. */
function Config({ run, names }: { run: Run; names: string[] }) {
  const [others, setOthers] = useState<Run[]>([]);
  useEffect(() => {
    let wanted = true;
    Promise.all(names.map((name) => get<Run>(runPath(name)).catch(() => null))).then((found) => {
      if (wanted) setOthers(found.filter((r): r is Run => r !== null));
    });
    return () => { wanted = false; };
  }, [names.join(",")]);
  if (!run.config) return null;
  const all = [run, ...others.filter((r) => names.includes(r.name))];
  const columns = all.map((r) => new Map(leaves(r.config)));
  const keys = [...new Set(columns.flatMap((c) => [...c.keys()]))];
  const differ = keys.filter((key) => new Set(columns.map((c) => c.get(key))).size > 1);
  const listed = all.length > 1 ? differ : keys;
  return (
    <details open={all.length > 1}>
      <summary>{all.length > 1 ? `config: ${differ.length} keys differ, ${keys.length - differ.length} are equal` : "config"}</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="config">
        <table class="compact">
          <thead><tr><th>key</th>{all.map((r) => <th key={r.name}>{r.name}</th>)}</tr></thead>
          <tbody>
            {listed.map((key) => <tr key={key}><td class="mono">{key}</td>{columns.map((c, n) => <td key={n} class="mono">{c.get(key) ?? "–"}</td>)}</tr>)}
          </tbody>
        </table>
      </div>
    </details>
  );
}
