/** Line charts: uPlot with the colors of the page, a shared cursor, and values beside the title. */

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { number } from "./ui";

export type Series = {
  name: string; xs: number[]; ys: (number | null)[]; color: number; dashed?: boolean;
  /** Whether the line continues over steps without a value, as those without an evaluation. */
  joined?: boolean;
};

const HEIGHT = 150;

function color(index: number): string {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--series-${index % 8}`).trim();
}

function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A centered mean over a window; a gap stays a gap. */
export function smooth(values: (number | null)[], window: number): (number | null)[] {
  if (window < 2) return values;
  const half = Math.floor(window / 2);
  return values.map((value, at) => {
    if (value === null) return null;
    const part = values.slice(Math.max(0, at - half), at + half + 1).filter((v): v is number => v !== null);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

export function Chart({
  title, series, unit, xName, smoothing = 0, stacked = false, note,
}: {
  title: string; series: Series[]; unit?: string; xName: string; smoothing?: number;
  stacked?: boolean; note?: string;
}) {
  const place = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState<number | null>(null);
  const [theme, setTheme] = useState(0);
  const xs = [...new Set(series.flatMap((s) => s.xs))].sort((a, b) => a - b);
  const columns = series.map((s) => {
    const byX = new Map(s.xs.map((x, i) => [x, s.ys[i]] as const));
    return xs.map((x) => byX.get(x) ?? null);
  });

  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    window.addEventListener("theme", changed);
    return () => window.removeEventListener("theme", changed);
  }, []);

  useEffect(() => {
    if (!place.current || !xs.length) return;
    const grid = css("--line"), ink = css("--muted");
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const drawn: uPlot.Series[] = [{}];
    const data: (number | null)[][] = [xs];
    if (stacked) {
      const sums = xs.map(() => 0);
      const layers = columns.map((column) => column.map((v, i) => (sums[i] += v ?? 0)));
      layers.reverse().forEach((layer, n) => {
        const own = series[series.length - 1 - n].color;
        data.push(layer);
        drawn.push({ stroke: color(own), fill: color(own), width: 1, points: { show: false } });
      });
    } else {
      columns.forEach((column, n) => {
        const own = series[n];
        const faint = smoothing > 1;
        data.push(column);
        drawn.push({
          stroke: color(own.color), width: faint ? 1 : 1.75, alpha: faint ? 0.3 : 1,
          dash: own.dashed ? [5, 4] : undefined, spanGaps: own.joined ?? false,
          points: { show: own.joined || xs.length < 40, size: 5, fill: color(own.color) },
        });
        if (faint) {
          data.push(smooth(column, smoothing));
          drawn.push({ stroke: color(own.color), width: 2, points: { show: false } });
        }
      });
    }
    const plot = new uPlot(
      {
        width: place.current.clientWidth, height: HEIGHT, series: drawn,
        scales: { x: { time: false }, y: { range: (_, low, high) => pad(low, high, stacked) } },
        axes: [
          { ...axis, size: 26, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? String(v) : "")) },
          { ...axis, size: 44, values: (_, ticks) => ticks.map((v) => number(v)) },
        ],
        legend: { show: false },
        cursor: { y: false, sync: { key: "curves" }, points: { size: 6 }, drag: { x: true, y: false } },
        hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
        padding: [8, 8, 0, 0],
      },
      data as uPlot.AlignedData,
      place.current,
    );
    const resize = new ResizeObserver(() => {
      if (place.current) plot.setSize({ width: place.current.clientWidth, height: HEIGHT });
    });
    resize.observe(place.current);
    return () => {
      resize.disconnect();
      plot.destroy();
    };
  }, [JSON.stringify(series), smoothing, stacked, theme]);

  const index = at ?? xs.length - 1;
  const values = columns.map((column) => column[index] ?? lastKnown(column, at));
  const described = series.map((s, n) => `${s.name} ${number(values[n])}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{title}{unit && <small> {unit}</small>}</span>
        <span class="chart-values">
          {series.map((s, n) => (
            <span key={s.name} title={s.name}>
              <i class={`dot d${s.color % 8}`} aria-hidden="true" />
              {series.length > 1 && <span class="chart-name">{s.name}</span>} {number(values[n])}
            </span>
          ))}
        </span>
      </figcaption>
      {xs.length ? (
        <div ref={place} class="plot" role="img" aria-label={`${title} by ${xName}; last: ${described}`} />
      ) : (
        <p class="empty small">{note ?? "no values yet"}</p>
      )}
    </figure>
  );
}

function lastKnown(column: (number | null)[], at: number | null): number | null {
  if (at !== null) return null;
  for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
  return null;
}

function pad(low: number | null, high: number | null, fromZero: boolean): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (fromZero) return [0, high * 1.05 || 1];
  const span = high - low || Math.abs(high) || 1;
  return [low >= 0 && low < span ? 0 : low - span * 0.08, high + span * 0.08];
}
