/** Requests to the dashboard's API, or to the data inside a static report. */

export type Row = {
  seq: number; id: string; status: string; mode: string; group: string; attempts: number;
  created: number; failure: { kind: string; message: string } | null; task: unknown;
  pruned: boolean; reward: number | null; seconds: number | null; step: number | null;
  calls: number; forks: number; sampled_tokens: number;
};
export type Group = {
  group: string; seq: number; rollouts: number; failed: number; succeeded: number;
  mean: number | null; min: number | null; max: number | null; step: number | null; task: string;
};
export type RunCard = {
  name: string; kind: string; model: string; state: string; steps: number;
  reward: number | null; gain: number | null; rewards: (number | null)[]; changed: number;
};
export type Alarm = { metric: string; value: number; step: number; message: string };
export type Statuses = Record<string, Record<string, number>>;
export type Run = {
  name: string; kind: string; state: string; model: string; gain: number | null;
  config: Record<string, unknown> | null; report: Record<string, unknown> | null;
  statuses: Statuses; steps: number; alarms: Alarm[]; now: number; changed: number | null;
};
export type Steps = {
  step: number[]; version: number[]; checkpoint: string[]; rollouts: number[];
  metrics: Record<string, (number | null)[]>;
};
export type Message = {
  role?: string; content?: unknown; reasoning?: unknown; name?: unknown; tool_call_id?: unknown;
  tool_calls?: { id?: string; name?: string; arguments?: unknown }[];
};
export type Generation = {
  message: Message; stop: string; ids: number[]; texts: string[] | null;
  logprobs: (number | null)[]; versions: [number, number][]; temperature: number;
  top_p: number; top_k: number; grammar: boolean;
};
export type Call = {
  id: string; parent: string | null; messages: Message[];
  context: { ids: number[]; texts: string[] | null }; prompt_length: number; created: number;
  dialect: string; model: string; agent: string; policy: string; tools: string[]; fork: string | null;
  cause: string | null; lossy: boolean; generations: Generation[];
};
export type Failure = { kind: string; message: string; traceback: string };
export type AttemptRecord = {
  id: string; number: number; worker: string; status: string; started: number;
  ended: number | null; reward: number | null; failure: Failure | null;
  resources: Record<string, number>; late: { reward: number | null; failure: Failure | null }[];
};
export type Reward = {
  key: string; value: number;
  target: { call: string | null; turn: number | null; agent: string | null } | null;
};
export type Span = {
  id: string; parent: string | null; name: string; kind: string; start: number; end: number;
  status: string; message: string; scope: string; attributes: Record<string, string>;
  events: { name: string; time: number; attributes: Record<string, unknown> }[];
  call: string | null;
};
export type Attempt = {
  attempt: AttemptRecord; rollout: string; calls: Call[]; special: number[]; rewards: Reward[];
  spans: Span[]; texts: boolean;
};
export type Credit = {
  reason: string | null; advantages: Record<string, number | number[]>; trained: string[];
  unselected: Record<string, string>; log_ratios: Record<string, (number | null)[]>;
  rows: { tokens: number; trained_tokens: number; generations: string[] }[];
};

export type Query = Record<string, string | number | boolean | null | undefined>;

export class ApiError extends Error {
  status: number;
  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

const element = document.getElementById("data");
const embedded: Record<string, unknown> | null = element
  ? JSON.parse(element.textContent ?? "{}")
  : null;

/** Whether this page is a file with its data inside, without a server. */
export const isStatic = embedded !== null;

export function runPath(run: string, rest = ""): string {
  return `/api/runs/${encodeURIComponent(run)}${rest}`;
}

export async function get<T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
  if (embedded) return readEmbedded<T>(embedded, path, query);
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) {
      search.set(key, String(value));
    }
  }
  const text = search.toString();
  const reply = await fetch(text ? `${path}?${text}` : path, { signal });
  const body = await reply.json().catch(() => ({ error: `status ${reply.status}` }));
  if (!reply.ok) throw new ApiError(reply.status, body.error ?? `status ${reply.status}`);
  return body as T;
}

export async function openSession(code: string): Promise<void> {
  const reply = await fetch("/api/session", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ code }),
  });
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new ApiError(reply.status, body.error ?? "the link was refused");
  }
}

/** Calls `changed` when something happened in the run, and `lost` when the server is gone. */
export function watch(run: string, changed: () => void, lost: (gone: boolean) => void): () => void {
  if (isStatic) return () => {};
  let source: EventSource | null = null;
  const open = () => {
    source = new EventSource(runPath(run, "/events"));
    let first = true;
    source.onmessage = () => {
      lost(false);
      if (!first) changed();
      first = false;
    };
    source.onerror = () => lost(true);
  };
  const close = () => {
    source?.close();
    source = null;
  };
  // Browsers allow six connections to a host: a tab that nobody sees keeps none.
  const seen = () => {
    close();
    if (!document.hidden) {
      open();
      changed();
    }
  };
  document.addEventListener("visibilitychange", seen);
  if (!document.hidden) open();
  return () => {
    document.removeEventListener("visibilitychange", seen);
    close();
  };
}

function readEmbedded<T>(data: Record<string, unknown>, path: string, query: Query): T {
  const found = data[decodeURIComponent(path)];
  if (found === undefined) {
    throw new ApiError(404, "this file has no more of this run: `whet view` shows all of it");
  }
  if (!path.endsWith("/rollouts")) return found as T;
  const rows = filterRows((found as { rollouts: Row[] }).rollouts, query);
  return { rollouts: rows, next: null, searched: rows.length, total: rows.length } as T;
}

/** The filters of the server, on the rows that a static report has. */
function filterRows(rows: Row[], query: Query): Row[] {
  const text = String(query.text ?? "").toLowerCase();
  const kept = rows.filter(
    (row) =>
      (!query.status || row.status === query.status) &&
      (!query.mode || row.mode === query.mode) &&
      (!query.group || row.group === query.group) &&
      (!query.task || row.task === rows.find((each) => each.id === query.task)?.task) &&
      (!query.step || row.step === Number(query.step)) &&
      (!query.forked || row.forks > 0) &&
      (!query.min_reward || (row.reward ?? -Infinity) >= Number(query.min_reward)) &&
      (!query.max_reward || (row.reward ?? Infinity) <= Number(query.max_reward)) &&
      (!text || `${row.task} ${row.failure?.message ?? ""}`.toLowerCase().includes(text)),
  );
  const order = String(query.order ?? "newest");
  if (order === "oldest") return kept.sort((a, b) => a.seq - b.seq);
  if (order === "newest") return kept.sort((a, b) => b.seq - a.seq);
  const sign = order === "best" ? -1 : 1;
  return kept
    .filter((row) => row.reward !== null)
    .sort((a, b) => sign * ((a.reward ?? 0) - (b.reward ?? 0) || a.seq - b.seq));
}
