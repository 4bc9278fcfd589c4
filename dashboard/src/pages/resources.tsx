import { runPath } from "../api";
import { setQuery, useRoute } from "../route";
import { Ago, Empty, Fault, LongText, bytes, number, text, useGet, useLive } from "../ui";

type Names = { resources: { name: string; version: number; created: number }[] };
type Versions = { name: string; versions: { version: number; value: unknown; created: number }[] };
type Checkpoints = { model: string | null; checkpoints: { step: number; version: number; policies: Record<string, number>; name: string; bytes: number | null; reward: number | null; evaluation: Record<string, number> }[] };

export function Resources({ run }: { run: string }) {
  const { query } = useRoute();
  const names = useGet<Names>(runPath(run, "/resources"));
  const points = useGet<Checkpoints>(runPath(run, "/checkpoints"));
  useLive(run, () => { names.reload(); points.reload(); });
  const chosen = query.get("name");
  const versions = useGet<Versions>(chosen ? runPath(run, `/resources/${encodeURIComponent(chosen)}`) : null);
  if (names.error && !names.data) return <Fault error={names.error} />;
  return (
    <section>
      <h1>Checkpoints</h1>
      {points.data?.model && <p>Trained model: <code>{points.data.model}</code></p>}
      {points.data?.checkpoints.length === 0 && <Empty>No step has finished yet.</Empty>}
      {points.data && points.data.checkpoints.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="checkpoints">
          <table class="compact narrow">
            <thead><tr><th>checkpoint</th><th class="r">step</th><th class="r">version</th><th class="r">reward</th><th class="r">held out</th><th class="r">on disk</th></tr></thead>
            <tbody>{[...points.data.checkpoints].reverse().slice(0, 200).map((c) => (
              <tr key={c.step}><td class="mono">{c.name}</td><td class="r num">{c.step}</td><td class="r num">{Object.keys(c.policies).length ? Object.entries(c.policies).map(([name, version]) => `${name} ${version}`).join(", ") : c.version}</td><td class="r num">{number(c.reward)}</td><td class="r num">{number(c.evaluation["eval/greedy"] ?? c.evaluation["eval/sampled"])}</td><td class="r num">{c.bytes === null ? <span class="muted">–</span> : bytes(c.bytes)}</td></tr>
            ))}</tbody>
          </table>
        </div>
      )}
      <h2>Resources</h2>
      {names.data?.resources.length === 0 && <Empty>No resources: prompts and other values that agents read would be listed here.</Empty>}
      {names.data && names.data.resources.length > 0 && (
        <table class="compact narrow">
          <thead><tr><th>name</th><th class="r">versions</th><th>newest</th></tr></thead>
          <tbody>{names.data.resources.map((r) => (
            <tr key={r.name}><td><button class="link mono" onClick={() => setQuery({ name: r.name })}>{r.name}</button></td><td class="r num">{r.version}</td><td class="muted"><Ago at={r.created} /></td></tr>
          ))}</tbody>
        </table>
      )}
      {versions.error && <Fault error={versions.error} />}
      {chosen && versions.data?.name === chosen && versions.data.versions.map((v) => (
        <details key={v.version} open={v === versions.data!.versions[0]}>
          <summary>{chosen} version {v.version} <span class="muted"><Ago at={v.created} /></span></summary>
          <LongText mono value={text(v.value)} />
        </details>
      ))}
    </section>
  );
}
