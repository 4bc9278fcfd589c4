/** Small parts that every page uses. Text of users is always a text node, never HTML. */

import type { ComponentChildren, RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, get, watch, type Query } from "./api";

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(digits)).toString();
}

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function Ago({ at, now }: { at: number | null; now?: number }) {
  if (!at) return <span>–</span>;
  const seconds = Math.max(0, (now ?? Date.now() / 1000) - at);
  const text =
    seconds < 60 ? `${Math.round(seconds)} s` :
    seconds < 3600 ? `${Math.round(seconds / 60)} min` :
    seconds < 86400 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
  return <time title={new Date(at * 1000).toISOString()}>{text} ago</time>;
}

export function bytes(value: number | null): string {
  if (value === null) return "–";
  return value > 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(1)} MB`;
}

export function Status({ value }: { value: string }) {
  return <span class={`status s-${value}`}>{value || "unknown"}</span>;
}

export function Tile({ name, value, note }: { name: string; value: ComponentChildren; note?: ComponentChildren }) {
  return (
    <div class="tile">
      <div class="tile-name">{name}</div>
      <div class="tile-value">{value}</div>
      <div class="tile-note">{note}</div>
    </div>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Fault({ error }: { error: Error }) {
  return <p class="fault" role="alert">{error.message}</p>;
}

export function Spark({ values }: { values: (number | null)[] }) {
  const known = values.map((v, i) => [i, v] as const).filter((p): p is [number, number] => p[1] !== null);
  if (known.length < 2) return <span class="muted">–</span>;
  const ys = known.map((p) => p[1]);
  const low = Math.min(...ys), span = Math.max(...ys) - low || 1, last = values.length - 1 || 1;
  const points = known.map(([x, y]) => `${((x / last) * 96 + 2).toFixed(1)},${(22 - ((y - low) / span) * 20).toFixed(1)}`);
  return (
    <svg class="spark" viewBox="0 0 100 24" role="img" aria-label={`reward from ${number(ys[0])} to ${number(ys[ys.length - 1])}`}>
      <polyline points={points.join(" ")} />
    </svg>
  );
}

/** A reward as a number and a bar between the least and the most of its list. */
export function RewardBar({ value, low, high }: { value: number | null; low: number; high: number }) {
  if (value === null) return <span class="muted">–</span>;
  const share = high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0;
  return (
    <span class="reward">
      <span class="reward-bar" aria-hidden="true"><span style={{ width: `${Math.round(share * 100)}%` }} /></span>
      <span class="num">{number(value)}</span>
    </span>
  );
}

export function text(value: unknown): string {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

/** Long text, shortened until it is opened. */
export function LongText({ value, lines = 20, mono }: { value: string; lines?: number; mono?: boolean }) {
  const [open, setOpen] = useState(false);
  const rows = value.split("\n");
  const isLong = rows.length > lines || value.length > 4000;
  const shown = open || !isLong ? value : rows.slice(0, lines).join("\n").slice(0, 4000);
  return (
    <div class={mono ? "text mono" : "text"}>
      {shown}
      {isLong && (
        <button class="link" onClick={() => setOpen(!open)}>
          {open ? "less" : `… all ${number(value.length)} characters`}
        </button>
      )}
    </div>
  );
}

export type Loaded<T> = { data: T | null; error: Error | null; reload: () => void };

/** Fetches when the path or the query changes; keeps the old data until the new is there. */
export function useGet<T>(path: string | null, query: Query = {}): Loaded<T> {
  const [state, setState] = useState<{ data: T | null; error: Error | null }>({ data: null, error: null });
  const [count, setCount] = useState(0);
  const key = path === null ? null : `${path}?${JSON.stringify(query)}`;
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    get<T>(path, query, stop.signal)
      .then((data) => setState({ data, error: null }))
      .catch((error: Error) => {
        if (error.name === "AbortError") return;
        if (error instanceof ApiError && error.status === 401) window.dispatchEvent(new Event("signed-out"));
        setState((old) => ({ data: old.data, error }));
      });
    return () => stop.abort();
  }, [key, count]);
  return { ...state, reload: () => setCount((n) => n + 1) };
}

/** Reloads, at most once a second, when the run changes. Returns whether the server is gone. */
export function useLive(run: string, reload: () => void): boolean {
  const [gone, setGone] = useState(false);
  const latest = useRef(reload);
  latest.current = reload;
  useEffect(() => {
    let timer = 0;
    const changed = () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => latest.current(), 150);
    };
    const stop = watch(run, changed, setGone);
    return () => {
      window.clearTimeout(timer);
      stop();
    };
  }, [run]);
  return gone;
}

export function Gone({ gone, run }: { gone: boolean; run: string }) {
  if (!gone) return null;
  return <p class="gone" role="status">The server does not answer: the run may have ended. Open it again with <code>whet view {run}</code>.</p>;
}

const MARGIN = 20;

/** The rows of a long table that are near the screen: only those are drawn. */
export function useVisible(body: RefObject<HTMLElement | null>, count: number): { first: number; last: number; height: number } {
  const [range, setRange] = useState({ first: 0, last: 60, height: 38 });
  useEffect(() => {
    let frame = 0;
    const look = () => {
      frame = 0;
      if (!body.current) return;
      const height = body.current.querySelector<HTMLElement>("tr.row")?.offsetHeight || 38;
      const top = -body.current.getBoundingClientRect().top;
      // In steps of ten rows, so that most frames of scrolling draw nothing new.
      const first = Math.max(0, Math.floor(top / height / 10) * 10 - MARGIN);
      const last = Math.ceil((top + window.innerHeight) / height / 10) * 10 + MARGIN;
      setRange((old) => (old.first === first && old.last === last && old.height === height ? old : { first, last, height }));
    };
    const plan = () => { frame ||= requestAnimationFrame(look); };
    look();
    window.addEventListener("scroll", plan, { passive: true });
    window.addEventListener("resize", plan);
    return () => {
      cancelAnimationFrame(frame);
      window.removeEventListener("scroll", plan);
      window.removeEventListener("resize", plan);
    };
  }, [count]);
  return { first: Math.min(range.first, Math.max(0, count - 1)), last: Math.min(range.last, count), height: range.height };
}

/** j and k move over the rows of a table, Enter opens the selected one. */
export function useRows(count: number, open: (index: number) => void): number {
  const [selected, setSelected] = useState(-1);
  useEffect(() => {
    const key = (event: KeyboardEvent) => {
      const tag = (event.target as HTMLElement).tagName;
      if (tag === "INPUT" || tag === "SELECT" || tag === "TEXTAREA" || event.ctrlKey || event.metaKey) return;
      if (event.key === "j") setSelected((n) => Math.min(count - 1, n + 1));
      else if (event.key === "k") setSelected((n) => Math.max(0, n - 1));
      else if (event.key === "Enter" && selected >= 0 && tag !== "A" && tag !== "BUTTON") open(selected);
    };
    window.addEventListener("keydown", key);
    return () => window.removeEventListener("keydown", key);
  }, [count, selected]);
  useEffect(() => {
    document.querySelector("tr.selected")?.scrollIntoView({ block: "nearest" });
  }, [selected]);
  return selected;
}
