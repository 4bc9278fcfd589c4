import { useEffect, useRef, useState } from "preact/hooks";
import { get, runPath, type Row } from "../api";
import { go, href, setQuery, useRoute } from "../route";
import { Empty, Fault, Gone, RewardBar, Status, duration, number, text, useLive, useRows } from "../ui";

type Page = { rollouts: Row[]; next: string | null; total: number | null };
const FILTERS = ["status", "mode", "group", "step", "agent", "text", "min_reward", "max_reward", "forked", "order"];
const MAX_ROWS = 5000;

export function Rollouts({ run }: { run: string }) {
  const { query } = useRoute();
  const filter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]));
  const key = JSON.stringify(filter);
  const [rows, setRows] = useState<Row[]>([]);
  const [next, setNext] = useState<string | null>(null);
  const [total, setTotal] = useState<number | null>(null);
  const [state, setState] = useState<"loading" | "ready" | Error>("loading");
  const [fresh, setFresh] = useState(false);
  const end = useRef<HTMLDivElement>(null);
  const request = useRef(0);

  const load = async (after: string | null) => {
    const mine = ++request.current;
    if (after === null) setState("loading");
    try {
      const page = await get<Page>(runPath(run, "/rollouts"), { ...filter, after });
      if (mine !== request.current) return;
      setRows((old) => (after === null ? page.rollouts : [...old, ...page.rollouts]));
      setNext(page.next);
      if (after === null) setTotal(page.total);
      setState("ready");
      setFresh(false);
    } catch (error) {
      if (mine === request.current) setState(error as Error);
    }
  };
  useEffect(() => { void load(null); }, [key, run]);
  // The list does not move below the pointer: new rollouts are announced, or taken at its top.
  const gone = useLive(run, () => (window.scrollY < 40 ? void load(null) : setFresh(true)));
  useEffect(() => {
    if (!end.current || !next || rows.length >= MAX_ROWS) return;
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) void load(next);
    }, { rootMargin: "600px" });
    seen.observe(end.current);
    return () => seen.disconnect();
  }, [next, rows.length]);
  const open = (row: Row) => go(href(["r", run, "rollouts", row.id]));
  const selected = useRows(rows.length, (n) => open(rows[n]));
  const rewards = rows.map((row) => row.reward).filter((v): v is number => v !== null);
  const low = Math.min(0, ...rewards), high = Math.max(...rewards, low + 1e-9);
  return (
    <section>
      <Gone gone={gone} run={run} />
      <Filters filter={filter} total={total} shown={rows.length} />
      {fresh && <button class="fresh" onClick={() => { window.scrollTo(0, 0); void load(null); }}>new rollouts</button>}
      {state instanceof Error && <Fault error={state} />}
      {state === "ready" && rows.length === 0 && <Empty>No rollout matches.</Empty>}
      {rows.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="rollouts">
          <table class="rollouts" aria-busy={state === "loading"}>
            <thead>
              <tr><th>rollout</th><th>status</th><th>reward</th><th class="r">step</th><th class="r">calls</th><th class="r">forks</th><th class="r">tokens</th><th class="r">time</th><th>task</th></tr>
            </thead>
            <tbody>
              {rows.map((row, n) => (
                <tr key={row.seq} class={n === selected ? "row selected" : "row"} onClick={() => open(row)}>
                  <td class="mono"><a href={href(["r", run, "rollouts", row.id])} onClick={(e) => e.stopPropagation()}>{row.id}</a></td>
                  <td><Status value={row.status} /></td>
                  <td><RewardBar value={row.reward} low={low} high={high} /></td>
                  <td class="r num">{row.step ?? "–"}</td>
                  <td class="r num">{row.calls}</td>
                  <td class="r num">{row.forks || ""}</td>
                  <td class="r num">{number(row.sampled_tokens)}</td>
                  <td class="r num">{duration(row.seconds)}</td>
                  <td class="excerpt">{row.failure ? <span class="bad">{row.failure.kind}: {row.failure.message}</span> : text(row.task)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <div ref={end} />
      {next && rows.length >= MAX_ROWS && <Empty>{number(rows.length)} rollouts are shown: narrow the filter for others.</Empty>}
    </section>
  );
}

function Filters({ filter, total, shown }: { filter: Record<string, string | null>; total: number | null; shown: number }) {
  const [words, setWords] = useState(filter.text ?? "");
  const [more, setMore] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    const timer = window.setTimeout(() => { if (words !== (filter.text ?? "")) setQuery({ text: words }); }, 250);
    return () => window.clearTimeout(timer);
  }, [words]);
  useEffect(() => {
    const key = (event: KeyboardEvent) => {
      if (event.key === "/" && (event.target as HTMLElement).tagName !== "INPUT") {
        event.preventDefault();
        field.current?.focus();
      }
    };
    window.addEventListener("keydown", key);
    return () => window.removeEventListener("keydown", key);
  }, []);
  const set = (name: string) => (event: { currentTarget: { value: string } }) => setQuery({ [name]: event.currentTarget.value });
  return (
    <form class={more ? "bar more-open" : "bar"} role="search" onSubmit={(e) => e.preventDefault()}>
      <label class="field grow"><span>text</span><input ref={field} type="search" placeholder="task, message, answer or failure" value={words} onInput={(e) => setWords(e.currentTarget.value)} /></label>
      <label class="field"><span>status</span>
        <select value={filter.status ?? ""} onChange={set("status")}>{["", "succeeded", "failed", "running", "queued"].map((v) => <option key={v} value={v}>{v || "any"}</option>)}</select></label>
      <label class="field"><span>for</span>
        <select value={filter.mode ?? ""} onChange={set("mode")}>{[["", "any"], ["train", "training"], ["val", "evaluation"]].map(([v, t]) => <option key={v} value={v}>{t}</option>)}</select></label>
      <label class="field"><span>order</span>
        <select value={filter.order ?? "newest"} onChange={set("order")}>{["newest", "oldest", "best", "worst"].map((v) => <option key={v} value={v}>{v}</option>)}</select></label>
      <button type="button" class="more-toggle" aria-expanded={more} onClick={() => setMore(!more)}>filters</button>
      <label class="field short extra"><span>step</span><input type="number" min="1" value={filter.step ?? ""} onChange={set("step")} /></label>
      <label class="field short extra"><span>reward ≥</span><input type="number" step="any" value={filter.min_reward ?? ""} onChange={set("min_reward")} /></label>
      <label class="field short extra"><span>reward ≤</span><input type="number" step="any" value={filter.max_reward ?? ""} onChange={set("max_reward")} /></label>
      <label class="field extra"><span>group</span><input value={filter.group ?? ""} onChange={set("group")} size={12} /></label>
      <label class="field extra"><span>agent</span><input value={filter.agent ?? ""} onChange={set("agent")} size={8} /></label>
      <label class="check extra"><input type="checkbox" checked={filter.forked === "true"} onChange={(e) => setQuery({ forked: e.currentTarget.checked })} /> forks</label>
      <span class="muted count" role="status">{total === null ? `${number(shown)} shown` : `${total.toLocaleString("en-US")} rollouts`}</span>
    </form>
  );
}
