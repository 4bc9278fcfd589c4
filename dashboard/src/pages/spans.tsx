import type { Call, Span } from "../api";
import { Empty, text } from "../ui";

/** Spans as a waterfall: indented by parent, on one axis of time. */
export function Spans({ spans, calls }: { spans: Span[]; calls: Call[] }) {
  if (!spans.length) return <Empty>No spans: <code>--runner.tracer otel</code> records those of the agent's SDK.</Empty>;
  const byId = new Map(spans.map((s) => [s.id, s]));
  const depth = (span: Span): number => {
    let n = 0;
    for (let p = span.parent; p && byId.has(p) && n < 20; p = byId.get(p)!.parent) n++;
    return n;
  };
  const end = Math.max(...spans.map((s) => s.end), 1);
  const order = new Map(calls.map((c, n) => [c.id, n + 1]));
  return (
    <div class="waterfall">
      {spans.slice(0, 2000).map((span) => (
        <details key={span.id} class={span.status === "error" ? "span error" : "span"}>
          <summary>
            <span class="span-name" style={{ paddingLeft: `${depth(span) * 14}px` }}>{span.name}{span.call && <span class="badge">call {order.get(span.call)}</span>}</span>
            <span class="span-track" aria-hidden="true"><span style={{ left: `${(span.start / end) * 100}%`, width: `${Math.max(0.4, ((span.end - span.start) / end) * 100)}%` }} /></span>
            <span class="num r">{(span.end - span.start).toFixed(1)} ms</span>
          </summary>
          {span.message && <p class="bad">{span.message}</p>}
          <table class="compact"><tbody>
            <tr><td>kind</td><td>{span.kind}, {span.scope}</td></tr>
            {Object.entries(span.attributes).map(([k, v]) => <tr key={k}><td class="mono">{k}</td><td class="mono wrap">{v}</td></tr>)}
            {span.events.map((e, n) => <tr key={n}><td>event {e.name}</td><td class="mono wrap">{text(e.attributes)}</td></tr>)}
          </tbody></table>
        </details>
      ))}
    </div>
  );
}
