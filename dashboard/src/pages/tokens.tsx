/** Every token of a path, colored by a number that its tooltip shows. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Attempt, Call, Credit, Generation } from "../api";
import { setQuery, useRoute } from "../route";
import { number } from "../ui";

type Token = {
  id: number; text: string; call: number; sampled: boolean; special: boolean;
  logprob: number | null; version: number | null; advantage: number | null; logRatio: number | null;
  trained: boolean; reason: string | null; generation: Generation | null;
};
const MODES = ["logprob", "mask", "advantage", "ratio", "version", "none"] as const;
type Mode = (typeof MODES)[number];
const NAMES: Record<Mode, string> = { logprob: "log-prob", mask: "mask", advantage: "advantage", ratio: "ratio", version: "version", none: "nothing" };
const BLOCK = 400;
/** Space that a tooltip needs below its token; without it, it stands above. */
const TIP_HEIGHT = 240;

/** The paths from the first call of a conversation to a generation that nothing continues. */
export function findPaths(calls: Call[]): [Call, number][][] {
  const continued = new Set(calls.filter((c) => c.generations.length).map((c) => c.parent));
  const owner = new Map<string, [Call, number]>();
  for (const call of calls) call.generations.forEach((_, i) => owner.set(`${call.id}.${i}`, [call, i]));
  const paths: [Call, number][][] = [];
  for (const [id, node] of owner) {
    if (continued.has(id)) continue;
    const path = [node];
    for (let parent = node[0].parent; parent && owner.has(parent); parent = path[0][0].parent) path.unshift(owner.get(parent)!);
    paths.push(path);
  }
  return paths;
}

function collect(path: [Call, number][], attempt: Attempt, credit: Credit | null): Token[] {
  const special = new Set(attempt.special), trained = new Set(credit?.trained ?? []);
  const order = new Map(attempt.calls.map((c, n) => [c.id, n + 1]));
  const tokens: Token[] = [];
  for (const [call, choice] of path) {
    const number = order.get(call.id) ?? 0;
    call.context.ids.forEach((id, i) => tokens.push({
      id, text: call.context.texts?.[i] ?? `[${id}]`, call: number, sampled: false, special: special.has(id),
      logprob: null, version: null, advantage: null, logRatio: null, trained: false, reason: "context", generation: null,
    }));
    const generation = call.generations[choice], key = `${call.id}.${choice}`;
    const advantage = credit?.advantages[key];
    const versions = generation.versions.flatMap(([v, n]) => Array<number>(n).fill(v));
    generation.ids.forEach((id, i) => tokens.push({
      id, text: generation.texts?.[i] ?? `[${id}]`, call: number, sampled: true, special: special.has(id),
      logprob: generation.logprobs[i], version: versions[i] ?? null,
      advantage: Array.isArray(advantage) ? advantage[i] : advantage ?? null,
      logRatio: credit?.log_ratios[key]?.[i] ?? null,
      trained: trained.has(key), reason: credit?.unselected[key] ?? null, generation,
    }));
  }
  return tokens;
}

/** The class of a color: five shades, fixed limits, so that two rollouts can be compared. */
function shade(token: Token, mode: Mode, scale: number, versions: number[]): string {
  if (!token.sampled) return "ctx";
  if (mode === "logprob") {
    const lp = token.logprob ?? -99;
    return `lp${lp > -0.1 ? 0 : lp > -0.5 ? 1 : lp > -1.5 ? 2 : lp > -4 ? 3 : 4}`;
  }
  if (mode === "mask") return token.trained ? "on" : "off";
  if (mode === "advantage") {
    if (token.advantage === null) return "off";
    const part = token.advantage / (scale || 1);
    const size = Math.abs(part) < 0.05 ? 0 : Math.abs(part) < 0.5 ? 1 : 2;
    return part < 0 ? `neg${size}` : `pos${size}`;
  }
  if (mode === "ratio") {
    if (token.logRatio === null) return "off";
    const size = Math.abs(token.logRatio) < 0.01 ? 0 : Math.abs(token.logRatio) < 0.2 ? 1 : 2;
    return token.logRatio < 0 ? `neg${size}` : `pos${size}`;
  }
  if (mode === "version") return `v${Math.max(0, versions.indexOf(token.version ?? -1)) % 5}`;
  return "plain";
}

export function Tokens({ attempt, credit }: { attempt: Attempt; credit: Credit | null }) {
  const { query } = useRoute();
  const mode = MODES.find((m) => m === query.get("by")) ?? "logprob";
  const paths = useMemo(() => findPaths(attempt.calls), [attempt]);
  const chosen = Math.min(paths.length - 1, Math.max(0, Number(query.get("path") ?? 1) - 1));
  const tokens = useMemo(() => collect(paths[chosen] ?? [], attempt, credit), [attempt, credit, chosen]);
  const [at, setAt] = useState<number | null>(null);
  const [spot, setSpot] = useState<{ x: number; y: number; above: boolean } | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const versions = [...new Set(tokens.filter((t) => t.sampled).map((t) => t.version ?? -1))].sort((a, b) => a - b);
  const scale = Math.max(...tokens.map((t) => Math.abs(t.advantage ?? 0)), 0);
  const sampled = tokens.filter((t) => t.sampled);
  const trained = sampled.filter((t) => t.trained).length;
  const mean = sampled.length ? sampled.reduce((a, t) => a + (t.logprob ?? 0), 0) / sampled.length : null;

  const place = (target: EventTarget | null) => {
    const span = (target as HTMLElement | null)?.closest<HTMLElement>("[data-n]");
    if (!span) { setAt(null); return; }
    const rect = span.getBoundingClientRect();
    setAt(Number(span.dataset.n));
    const above = rect.bottom + TIP_HEIGHT > window.innerHeight && rect.top > TIP_HEIGHT;
    setSpot({ x: Math.min(rect.left, window.innerWidth - 270), y: above ? rect.top - 6 : rect.bottom + 6, above });
  };
  const key = (event: KeyboardEvent) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) { if (event.key === "Escape") setAt(null); return; }
    event.preventDefault();
    const next = Math.min(tokens.length - 1, Math.max(0, (at ?? -1) + move));
    const span = box.current?.querySelector(`[data-n="${next}"]`);
    span?.scrollIntoView({ block: "nearest" });
    place(span ?? null);
  };
  useEffect(() => setAt(null), [chosen, attempt]);

  const blocks: Token[][] = [];
  for (let i = 0; i < tokens.length; i += BLOCK) blocks.push(tokens.slice(i, i + BLOCK));
  return (
    <div>
      <div class="bar sticky">
        <div class="field"><span id="by">color by</span>
          <div class="segmented" role="group" aria-labelledby="by">
            {MODES.map((m) => <button key={m} aria-pressed={m === mode} onClick={() => setQuery({ by: m === "logprob" ? null : m })}>{NAMES[m]}</button>)}
          </div>
        </div>
        {paths.length > 1 && (
          <label class="field"><span>row</span>
            <select value={chosen + 1} onChange={(e) => setQuery({ path: e.currentTarget.value })}>
              {paths.map((p, n) => <option key={n} value={n + 1}>{n + 1} of {paths.length}: {p.length} calls</option>)}
            </select>
          </label>
        )}
        <span class="muted count">{number(tokens.length)} tokens, {number(sampled.length)} sampled, {number(trained)} trained, mean log-prob {number(mean)}</span>
      </div>
      <Legend mode={mode} scale={scale} versions={versions} reason={credit?.reason ?? null} />
      {mode === "ratio" && credit && !credit.reason && sampled.every((t) => t.logRatio === null) && <p class="muted small">No ratios were kept: the local trainer keeps them in the run's folder, which must be on this machine.</p>}
      {!attempt.texts && <p class="muted small">The tokenizer of the model is not on this machine: ids are shown.</p>}
      <div ref={box} class="tokens" tabIndex={0} role="group" aria-label="tokens: left and right arrows move, the details follow" onKeyDown={key} onMouseOver={(e) => place(e.target)} onClick={(e) => place(e.target)} onMouseLeave={() => setAt(null)}>
        {blocks.map((block, b) => (
          <div key={b} class="block">
            {block.map((token, i) => {
              const n = b * BLOCK + i;
              const kind = `${shade(token, mode, scale, versions)}${token.special ? " special" : ""}${n === at ? " here" : ""}`;
              return <span key={n} data-n={n} class={kind}>{visible(token.text)}{token.text.includes("\n") && <br />}</span>;
            })}
          </div>
        ))}
      </div>
      {at !== null && spot && tokens[at] && <Tip token={tokens[at]} index={at} {...spot} />}
    </div>
  );
}

function visible(text: string): string {
  if (text === "") return "·";
  return text.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/[\u0000-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g, "�");
}

function Legend({ mode, scale, versions, reason }: { mode: Mode; scale: number; versions: number[]; reason: string | null }) {
  const items: Record<Mode, [string, string][]> = {
    logprob: [["lp0", "> −0.1"], ["lp1", "> −0.5"], ["lp2", "> −1.5"], ["lp3", "> −4"], ["lp4", "below"]],
    mask: [["on", "trained"], ["off", "sampled, not trained"]],
    advantage: [["neg2", `−${number(scale)}`], ["neg1", ""], ["pos0", "0"], ["pos1", ""], ["pos2", `+${number(scale)}`]],
    ratio: [["neg2", "below 0.82"], ["neg1", "below 0.99"], ["pos0", "1"], ["pos1", "above 1.01"], ["pos2", "above 1.22"], ["off", "not known"]],
    version: versions.map((v, n) => [`v${n % 5}`, `version ${v}`]),
    none: [["plain", "sampled"]],
  };
  return (
    <p class="legend">
      {items[mode].map(([kind, name], n) => <span key={n}><i class={`swatch ${kind}`} aria-hidden="true" /> {name}</span>)}
      <span><i class="swatch ctx" aria-hidden="true" /> context</span>
      {mode === "ratio" && <span>probability by the trainer to that by the sampler, at the first update with the token</span>}
      {(mode === "mask" || mode === "advantage" || mode === "ratio") && reason && <span class="muted">{reason}</span>}
    </p>
  );
}

function Tip({ token, index, x, y, above }: { token: Token; index: number; x: number; y: number; above: boolean }) {
  const lp = token.logprob;
  const rows: [string, string][] = [
    ["token", JSON.stringify(token.text)],
    ["id", String(token.id)],
    ["position", `${index + 1}, call ${token.call}`],
  ];
  if (token.sampled) {
    rows.push(["log-prob", lp === null ? "−∞" : `${lp.toFixed(4)}  (p ${number(Math.exp(lp))})`]);
    rows.push(["version", String(token.version ?? "–")]);
    rows.push(["advantage", token.advantage === null ? "–" : `${token.advantage >= 0 ? "+" : ""}${number(token.advantage)}`]);
    rows.push(["ratio", token.logRatio === null ? "not known" : Math.exp(token.logRatio).toFixed(3)]);
    rows.push(["trained", token.trained ? "yes" : token.reason ?? "no"]);
    rows.push(["sampling", `temperature ${token.generation?.temperature}, top-p ${token.generation?.top_p}`]);
  } else {
    rows.push(["kind", "context: rendered, not sampled"]);
  }
  return (
    <div class={above ? "tip above" : "tip"} role="status" style={{ left: `${x}px`, top: `${y}px` }}>
      <dl>{rows.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
    </div>
  );
}
