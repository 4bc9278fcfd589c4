import { runPath } from "../api";
import { Chart } from "../chart";
import { Empty, Fault, Gone, Tile, number, useGet, useLive } from "../ui";

type Health = {
  rollouts: number; mean: number | null; std: number | null; groups: number; silent_groups: number;
  histogram: { edges: number[]; counts: number[] }; length_correlation: number | null;
  points: [number, number][]; findings: string[];
  judge: { step: number[]; score: (number | null)[]; disagreement: (number | null)[]; failed: (number | null)[] } | null;
  components: { key: string; step: number[]; mean: number[]; std: number[]; min: number; max: number; count: number; correlation: number | null }[];
};

export function RewardHealth({ run }: { run: string }) {
  const { data, error, reload } = useGet<Health>(runPath(run, "/rewards"));
  const gone = useLive(run, reload);
  if (error && !data) return <Fault error={error} />;
  if (!data) return <Empty>loading…</Empty>;
  if (!data.rollouts) return <Empty>No step has trained on a rollout yet.</Empty>;
  return (
    <section>
      <Gone gone={gone} run={run} />
      <div class="tiles">
        <Tile name="rollouts" value={number(data.rollouts)} note="of the last steps" />
        <Tile name="mean reward" value={number(data.mean)} note={`spread ${number(data.std)}`} />
        <Tile name="groups without signal" value={`${data.silent_groups} / ${data.groups}`} note="all rewards equal" />
        <Tile name="reward and length" value={number(data.length_correlation, 2)} note="correlation" />
      </div>
      {data.findings.length > 0 ? (
        <ul class="alarms">{data.findings.map((f) => <li key={f}><b>{f}</b></li>)}</ul>
      ) : <p class="good">Nothing to worry about: rewards vary, and no simple pattern explains them.</p>}
      <div class="charts">
        <figure class="chart"><figcaption><span class="chart-title">Distribution of rewards</span></figcaption><Histogram {...data.histogram} /></figure>
        <figure class="chart"><figcaption><span class="chart-title">Reward by length <small>sampled tokens</small></span></figcaption><Scatter points={data.points} /></figure>
        {data.judge && (
          <Chart title="Judge" unit="votes" xName="step" series={[
            { name: "disagreement", xs: data.judge.step, ys: data.judge.disagreement, color: 1 },
            { name: "mean score", xs: data.judge.step, ys: data.judge.score, color: 0 },
          ]} />
        )}
        {data.components.map((c) => (
          <Chart key={c.key} title={c.key} xName="step" unit={c.correlation === null ? undefined : `correlation with the reward ${number(c.correlation, 2)}`} series={[{ name: "mean", xs: c.step, ys: c.mean, color: 0 }, { name: "spread", xs: c.step, ys: c.std, color: 1 }]} />
        ))}
      </div>
      {!data.judge && <p class="muted small">No judge scored these rollouts; with one, its disagreement is shown here.</p>}
      {data.components.length === 0 && <p class="muted small">No named rewards were emitted: <code>whet.emit_reward(value, key)</code> would show components here.</p>}
    </section>
  );
}

function Histogram({ edges, counts }: { edges: number[]; counts: number[] }) {
  const most = Math.max(...counts, 1);
  return (
    <div class="histogram" role="img" aria-label={`rewards from ${number(edges[0])} to ${number(edges[edges.length - 1])}`}>
      {counts.map((count, n) => (
        <div key={n} title={`${number(edges[n])} to ${number(edges[n + 1])}: ${count}`}>
          <span class="num">{count || ""}</span><i style={{ height: `${(count / most) * 100}px` }} /><span class="num">{n % 3 === 0 || n === counts.length - 1 ? number(n === counts.length - 1 ? edges[n + 1] : edges[n], 2) : ""}</span>
        </div>
      ))}
    </div>
  );
}

function Scatter({ points }: { points: [number, number][] }) {
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const right = Math.max(...xs, 1), low = Math.min(...ys, 0), high = Math.max(...ys, low + 1e-9);
  return (
    <svg class="scatter" viewBox="0 0 320 150" role="img" aria-label={`${points.length} rollouts by length and reward`}>
      <line x1="30" y1="128" x2="314" y2="128" /><line x1="30" y1="8" x2="30" y2="128" />
      {points.map(([x, y], n) => <circle key={n} cx={30 + (x / right) * 280} cy={128 - ((y - low) / (high - low)) * 116} r="2.5" />)}
      <text x="30" y="145">0</text><text x="312" y="145" text-anchor="end">{number(right)}</text>
      <text x="26" y="130" text-anchor="end">{number(low)}</text><text x="26" y="16" text-anchor="end">{number(high)}</text>
    </svg>
  );
}
