import { useEffect, useState } from "preact/hooks";
import { get, runPath, type Group } from "../api";
import { href, setQuery, useRoute } from "../route";
import { Empty, Fault, number, useLive } from "../ui";

type Page = { groups: Group[]; next: number | null };

/** Rollouts of the same task that are compared with each other, with the spread of their rewards. */
export function Groups({ run }: { run: string }) {
  const { query } = useRoute();
  const step = query.get("step"), mode = query.get("mode") ?? "train";
  const [groups, setGroups] = useState<Group[]>([]);
  const [next, setNext] = useState<number | null>(null);
  const [state, setState] = useState<"loading" | "ready" | Error>("loading");
  const load = async (before: number | null) => {
    try {
      const page = await get<Page>(runPath(run, "/groups"), { step, mode, before });
      setGroups((old) => (before === null ? page.groups : [...old, ...page.groups]));
      setNext(page.next);
      setState("ready");
    } catch (error) {
      setState(error as Error);
    }
  };
  useEffect(() => { void load(null); }, [run, step, mode]);
  useLive(run, () => { if (groups.length <= 50) void load(null); });
  const low = Math.min(0, ...groups.map((g) => g.min ?? 0)), high = Math.max(low + 1e-9, ...groups.map((g) => g.max ?? low));
  return (
    <>
      <form class="bar" onSubmit={(e) => e.preventDefault()}>
        <label class="field short"><span>step</span><input type="number" min="1" value={step ?? ""} onChange={(e) => setQuery({ step: e.currentTarget.value })} /></label>
        <label class="field"><span>for</span>
          <select value={mode} onChange={(e) => setQuery({ mode: e.currentTarget.value === "train" ? null : e.currentTarget.value })}>{[["train", "training"], ["val", "evaluation"]].map(([v, t]) => <option key={v} value={v}>{t}</option>)}</select></label>
        <span class="muted count" role="status">{number(groups.length)} {next === null ? "groups" : "groups shown"}</span>
      </form>
      {state instanceof Error && <Fault error={state} />}
      {state === "ready" && groups.length === 0 && <Empty>No group matches.</Empty>}
      {groups.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="groups">
          <table>
            <thead><tr><th>group</th><th class="r">step</th><th class="r">rollouts</th><th class="r">failed</th><th class="r">mean</th><th>least to most</th><th>signal</th><th>task</th></tr></thead>
            <tbody>{groups.map((g) => (
              <tr key={g.group}>
                <td class="mono"><a href={href(["r", run, "rollouts"], { group: g.group, order: "best" })}>{g.group}</a></td>
                <td class="r num">{g.step ?? "–"}</td>
                <td class="r num">{g.rollouts}</td>
                <td class="r num">{g.failed ? <span class="bad">{g.failed}</span> : ""}</td>
                <td class="r num">{number(g.mean)}</td>
                <td><Range group={g} low={low} high={high} /></td>
                <td class="muted">{g.succeeded < 2 ? "–" : g.min === g.max ? "none: all equal" : "yes"}</td>
                <td class="excerpt">{g.task}</td>
              </tr>
            ))}</tbody>
          </table>
        </div>
      )}
      {next !== null && <button class="more" onClick={() => void load(next)}>more groups</button>}
    </>
  );
}

function Range({ group, low, high }: { group: Group; low: number; high: number }) {
  if (group.min === null || group.max === null || group.mean === null) return <span class="muted">–</span>;
  const at = (value: number) => 6 + ((value - low) / (high - low)) * 108;
  return (
    <svg class="range" viewBox="0 0 120 14" role="img" aria-label={`from ${number(group.min)} to ${number(group.max)}`}>
      <line x1="6" y1="7" x2="114" y2="7" /><line class="spread" x1={at(group.min)} y1="7" x2={at(group.max)} y2="7" /><circle cx={at(group.mean)} cy="7" r="4" />
    </svg>
  );
}
