/** The calls of an attempt as lanes: one for each path, as in a commit graph. */

import { useMemo } from "preact/hooks";
import type { Call, Credit } from "../api";
import { setQuery } from "../route";
import { number } from "../ui";

const STEP = 72, LANE = 46, LEFT = 24, TOP = 26;

type Node = { call: Call; number: number; lane: number; parent: Node | null };

export function layout(calls: Call[]): { nodes: Node[]; lanes: number } {
  const owner = new Map<string, Node>();
  const tips = new Map<number, Node>();
  const nodes: Node[] = [];
  let lanes = 0;
  calls.forEach((call, n) => {
    const parent = call.parent ? owner.get(call.parent) ?? null : null;
    // A call continues the lane of its parent if it is the last there; else it opens a lane.
    const lane = parent && tips.get(parent.lane) === parent ? parent.lane : lanes++;
    const node = { call, number: n + 1, lane, parent };
    tips.set(lane, node);
    call.generations.forEach((_, i) => owner.set(`${call.id}.${i}`, node));
    nodes.push(node);
  });
  return { nodes, lanes };
}

export function Graph({ calls, credit }: { calls: Call[]; credit: Credit | null }) {
  const { nodes, lanes } = useMemo(() => layout(calls), [calls]);
  const forks = nodes.filter((node) => node.call.fork);
  const trained = new Set((credit?.trained ?? []).map((id) => id.slice(0, id.lastIndexOf("."))));
  const x = (node: Node) => LEFT + (node.number - 1) * STEP, y = (node: Node) => TOP + node.lane * LANE;
  const open = () => setQuery({ view: null });
  return (
    <div>
      <div class="scroll graph" tabIndex={0} role="region" aria-label="message graph">
        <svg width={LEFT * 2 + (nodes.length - 1) * STEP + 40} height={TOP * 2 + (lanes - 1) * LANE + 14} role="img" aria-label={`${calls.length} calls in ${lanes} paths, ${forks.length} forks`}>
          {nodes.filter((n) => n.parent).map((n) => {
            const p = n.parent!;
            return <path key={n.number} class="edge" d={`M${x(p)},${y(p)} C${x(p) + STEP / 2},${y(p)} ${x(n) - STEP / 2},${y(n)} ${x(n)},${y(n)}`} />;
          })}
          {nodes.map((n) => (
            <g key={n.number} class={n.call.fork ? "node forked" : "node"} onClick={open}>
              <circle cx={x(n)} cy={y(n)} r={11} class={trained.has(n.call.id) ? "trained" : ""}>
                <title>{`call ${n.number}${n.call.fork ? `, fork: ${n.call.fork}` : ""}`}</title>
              </circle>
              <text x={x(n)} y={y(n) + 4}>{n.number}</text>
              {n.call.fork && <text class="why" x={x(n)} y={y(n) + 25}>{n.call.fork.replace(/_/g, " ")}</text>}
            </g>
          ))}
        </svg>
      </div>
      <p class="muted small">Each line is a path of turns and becomes one row of training; filled calls were trained.</p>
      <table class="compact">
        <thead><tr><th>call</th><th>continues</th><th>agent</th><th class="r">prompt</th><th class="r">new</th><th class="r">sampled</th><th>why it forked</th></tr></thead>
        <tbody>
          {nodes.map((n) => (
            <tr key={n.number}>
              <td>{n.number}</td>
              <td>{n.parent ? `call ${n.parent.number}` : "begins"}</td>
              <td>{n.call.agent || "–"}</td>
              <td class="r num">{number(n.call.prompt_length)}</td>
              <td class="r num">{number(n.call.context.ids.length)}</td>
              <td class="r num">{number(n.call.generations.reduce((m, g) => m + g.ids.length, 0))}</td>
              <td>{n.call.fork && <span class="cause"><b>{n.call.fork.replace(/_/g, " ")}</b>: {n.call.cause}</span>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
