import { runPath, type Statuses } from "../api";
import { href } from "../route";
import { Ago, Empty, Fault, Gone, Tile, duration, number, useGet, useLive } from "../ui";

type Queue = {
  statuses: Statuses; now: number;
  workers: { name: string; started: number; seen: number; due: number; running: string[] }[];
  gateways: { url: string; model: string }[];
  running: { attempt: string; worker: string; started: number; rollout: string; lease_until: number | null }[];
  failures: { kind: string; message: string; count: number; last: string; first: string; first_step: number | null; last_step: number | null }[];
  retried: Record<string, number>;
};

export function QueuePage({ run }: { run: string }) {
  const { data, error, reload } = useGet<Queue>(runPath(run, "/queue"));
  const gone = useLive(run, reload);
  if (error && !data) return <Fault error={error} />;
  if (!data) return <Empty>loading…</Empty>;
  const total = (status: string) => Object.values(data.statuses).reduce((n, s) => n + (s[status] ?? 0), 0);
  const retried = Object.entries(data.retried);
  return (
    <section>
      <Gone gone={gone} run={run} />
      <div class="tiles">
        {["queued", "running", "succeeded", "failed"].map((s) => <Tile key={s} name={s} value={number(total(s))} note={<a href={href(["r", run, "rollouts"], { status: s })}>show</a>} />)}
        <Tile name="workers alive" value={`${data.workers.filter((w) => w.due >= data.now).length} / ${data.workers.length}`} note="" />
      </div>
      <h2>Failures by reason</h2>
      {data.failures.length === 0 ? <Empty>No rollout has failed.</Empty> : (
        <div class="scroll" tabIndex={0} role="region" aria-label="failures">
          <table class="compact">
            <thead><tr><th>kind</th><th class="r">rollouts</th><th>message</th><th>steps</th><th>example</th></tr></thead>
            <tbody>{data.failures.map((f, n) => (
              <tr key={n}><td class="bad">{f.kind}</td><td class="r num">{f.count}</td><td class="wrap">{f.message}</td>
                <td class="num">{f.first_step === null ? "–" : f.first_step + 1}{f.last_step !== f.first_step && f.last_step !== null ? ` to ${f.last_step + 1}` : ""}</td>
                <td class="mono"><a href={href(["r", run, "rollouts", f.last])}>{f.last}</a></td></tr>
            ))}</tbody>
          </table>
        </div>
      )}
      {retried.length > 0 && <p class="muted">Attempts that a later attempt mended: {retried.map(([k, n]) => `${n} ${k}`).join(", ")}.</p>}
      <h2>Workers</h2>
      {data.workers.length === 0 ? <Empty>No worker has claimed a rollout.</Empty> : (
        <div class="scroll" tabIndex={0} role="region" aria-label="workers">
          <table class="compact">
            <thead><tr><th>worker</th><th>state</th><th class="r">running</th><th>seen</th></tr></thead>
            <tbody>{data.workers.map((w) => (
              <tr key={w.name}><td class="mono">{w.name}</td><td>{w.due >= data.now ? "alive" : <span class="muted">no heartbeat for {duration(data.now - w.due)}</span>}</td><td class="r num">{w.running.length}</td><td class="muted"><Ago at={w.seen} now={data.now} /></td></tr>
            ))}</tbody>
          </table>
        </div>
      )}
      {data.running.length > 0 && <h2>Running attempts</h2>}
      {data.running.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="running attempts">
          <table class="compact">
            <thead><tr><th>attempt</th><th>worker</th><th class="r">for</th><th class="r">lease left</th></tr></thead>
            <tbody>{data.running.map((a) => (
              <tr key={a.attempt}><td class="mono"><a href={href(["r", run, "rollouts", a.rollout])}>{a.attempt}</a></td><td class="mono">{a.worker}</td><td class="r num">{duration(data.now - a.started)}</td><td class="r num">{a.lease_until === null ? "–" : duration(Math.max(0, a.lease_until - data.now))}</td></tr>
            ))}</tbody>
          </table>
        </div>
      )}
      {data.gateways.length > 0 && <p class="muted">Gateways: {data.gateways.map((g) => `${g.url} (${g.model})`).join(", ")}</p>}
    </section>
  );
}
