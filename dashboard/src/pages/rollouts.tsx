import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, runPath, type Row } from "../api";
import { Chart } from "../chart";
import { go, href, setQuery, useRoute } from "../route";
import { Empty, Fault, Gone, RewardBar, Status, duration, number, text, useLive, useRows, useVisible } from "../ui";
import { Groups } from "./groups";

type Page = { rollouts: Row[]; next: string | null; searched: number; total: number | null };
const FILTERS = ["status", "mode", "group", "step", "agent", "policy", "text", "task", "min_reward", "max_reward", "forked", "order"];
const COLUMNS = 9;
const PAGE = 50, NEXT_PAGE = 200, MAX_ROWS = 20_000;

export function Rollouts({ run }: { run: string }) {
  const { query } = useRoute();
  const view = query.get("view") === "groups" ? "groups" : "rollouts";
  return (
    <section>
      <div class="segmented views" role="group" aria-label="one by one or in groups">
        {["rollouts", "groups"].map((v) => <button key={v} aria-pressed={v === view} onClick={() => setQuery({ view: v === "rollouts" ? null : v })}>{v}</button>)}
      </div>
      {view === "groups" ? <Groups run={run} /> : <List run={run} />}
    </section>
  );
}

function List({ run }: { run: string }) {
  const { query } = useRoute();
  const filter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]));
  const key = JSON.stringify(filter);
  const [rows, setRows] = useState<Row[]>([]);
  const [next, setNext] = useState<string | null>(null);
  const [total, setTotal] = useState<number | null>(null);
  const [searched, setSearched] = useState(0);
  const [state, setState] = useState<"loading" | "ready" | Error>("loading");
  const [fresh, setFresh] = useState(false);
  const end = useRef<HTMLDivElement>(null);
  const request = useRef(0);

  const load = async (after: string | null) => {
    const mine = ++request.current;
    if (after === null) setState("loading");
    try {
      const page = await get<Page>(runPath(run, "/rollouts"), { ...filter, after, limit: after === null ? PAGE : NEXT_PAGE });
      if (mine !== request.current) return;
      setRows((old) => (after === null ? page.rollouts : [...old, ...page.rollouts]));
      setSearched((old) => (after === null ? 0 : old) + page.searched);
      setNext(page.next);
      if (after === null) setTotal(page.total);
      setState("ready");
      if (after === null) setFresh(false);
    } catch (error) {
      if (mine === request.current) setState(error as Error);
    }
  };
  useEffect(() => { void load(null); }, [key, run]);
  // The list does not move below the pointer: new rollouts are announced, or taken at its top.
  const isShort = rows.length <= PAGE && (next === null || rows.length === PAGE);
  const gone = useLive(run, () => (window.scrollY < 40 && isShort ? void load(null) : setFresh(true)));
  useEffect(() => {
    if (!end.current || !next || rows.length >= MAX_ROWS) return;
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) void load(next);
    }, { rootMargin: "1200px" });
    seen.observe(end.current);
    return () => seen.disconnect();
  }, [next, rows.length]);
  const isSearching = next !== null && rows.length < PAGE;
  return (
    <>
      <Gone gone={gone} run={run} />
      <Filters filter={filter} count={total !== null ? `${total.toLocaleString("en-US")} rollouts` : isSearching ? `${number(rows.length)} found, ${searched.toLocaleString("en-US")} searched…` : `${number(rows.length)} ${next === null ? "found" : "shown"}`} />
      {filter.task && <SameTask run={run} rows={rows} of={filter.task} />}
      {fresh && <button class="fresh" onClick={() => { window.scrollTo(0, 0); void load(null); }}>new rollouts</button>}
      {state instanceof Error && <Fault error={state} />}
      {state === "ready" && rows.length === 0 && <Empty>{next === null ? "No rollout matches." : "searching…"}</Empty>}
      {rows.length > 0 && <Table run={run} rows={rows} busy={state === "loading"} />}
      <div ref={end} />
      {next && rows.length >= MAX_ROWS && <Empty>{number(rows.length)} rollouts are shown: narrow the filter for others.</Empty>}
    </>
  );
}

/** A list of any length, of which only what is near the screen is in the document. */
function Table({ run, rows, busy }: { run: string; rows: Row[]; busy: boolean }) {
  const body = useRef<HTMLTableSectionElement>(null);
  const open = (row: Row) => go(href(["r", run, "rollouts", row.id]));
  const selected = useRows(rows.length, (n) => open(rows[n]));
  const { first, last, height } = useVisible(body, rows.length);
  useEffect(() => {
    if (!body.current || (selected >= first && selected < last) || selected < 0) return;
    const top = window.scrollY + body.current.getBoundingClientRect().top + selected * height;
    window.scrollTo(0, top - window.innerHeight / 2);
  }, [selected]);
  const [low, high] = useMemo(() => {
    const rewards = rows.map((row) => row.reward).filter((v): v is number => v !== null);
    const least = rewards.reduce((a, b) => Math.min(a, b), 0);
    return [least, rewards.reduce((a, b) => Math.max(a, b), least + 1e-9)];
  }, [rows]);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="rollouts">
      <table class="rollouts" aria-busy={busy} aria-rowcount={rows.length + 1}>
        <thead>
          <tr><th class="w-id">rollout</th><th class="w-status">status</th><th class="w-reward">reward</th><th class="r w-n">step</th><th class="r w-n">calls</th><th class="r w-n">forks</th><th class="r w-n">tokens</th><th class="r w-n">time</th><th>task</th></tr>
        </thead>
        <tbody ref={body}>
          <Spacer height={first * height} />
          {rows.slice(first, last).map((row, i) => (
            <tr key={row.seq} aria-rowindex={first + i + 2} class={first + i === selected ? "row selected" : "row"} onClick={() => open(row)}>
              <td class="mono" title={row.id}><a href={href(["r", run, "rollouts", row.id])} onClick={(e) => e.stopPropagation()}>{row.id}</a></td>
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
          <Spacer height={(rows.length - last) * height} />
        </tbody>
      </table>
    </div>
  );
}

function Spacer({ height }: { height: number }) {
  return height > 0 ? <tr class="spacer" aria-hidden="true"><td colSpan={COLUMNS} style={{ height: `${height}px` }} /></tr> : null;
}

/** The rewards of one task, step by step. */
function SameTask({ run, rows, of }: { run: string; rows: Row[]; of: string }) {
  const steps = new Map<number, number[]>();
  for (const row of rows) {
    if (row.step !== null && row.reward !== null) steps.set(row.step, [...(steps.get(row.step) ?? []), row.reward]);
  }
  const xs = [...steps.keys()].sort((a, b) => a - b);
  const mean = (values: number[]) => values.reduce((a, b) => a + b, 0) / values.length;
  return (
    <>
      <p>The same task as <a class="mono" href={href(["r", run, "rollouts", of])}>{of}</a>, over all steps. <button class="link" onClick={() => setQuery({ task: null })}>all tasks</button></p>
      {xs.length > 0 && (
        <div class="charts same-task"><Chart title="Reward of this task" xName="step" series={[
          { name: "mean", xs, ys: xs.map((x) => mean(steps.get(x)!)), color: 0, joined: true },
          { name: "best", xs, ys: xs.map((x) => Math.max(...steps.get(x)!)), color: 1, joined: true, dashed: true },
        ]} /></div>
      )}
    </>
  );
}

function Filters({ filter, count }: { filter: Record<string, string | null>; count: string }) {
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
      <label class="field extra"><span>policy</span><input value={filter.policy ?? ""} onChange={set("policy")} size={8} /></label>
      <label class="check extra"><input type="checkbox" checked={filter.forked === "true"} onChange={(e) => setQuery({ forked: e.currentTarget.checked })} /> forks</label>
      <span class="muted count" role="status">{count}</span>
    </form>
  );
}
