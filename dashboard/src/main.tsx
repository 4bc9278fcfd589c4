import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { isStatic, openSession, runPath, type Run } from "./api";
import { href, parseHash, useRoute } from "./route";
import { Status, useGet } from "./ui";
import { Curves } from "./pages/curves";
import { DoctorPage } from "./pages/doctor";
import { Evaluations } from "./pages/evaluations";
import { QueuePage } from "./pages/queue";
import { Resources } from "./pages/resources";
import { RewardHealth } from "./pages/rewards";
import { Rollout } from "./pages/rollout";
import { Rollouts } from "./pages/rollouts";
import { Runs } from "./pages/runs";

const TABS: [string, string][] = [["", "Curves"], ["rollouts", "Rollouts"], ["queue", "Queue"], ["rewards", "Rewards"], ["evaluations", "Evaluations"], ["resources", "Checkpoints"], ["doctor", "Doctor"]];
const KEYS: [string, string][] = [["j k", "next and previous row"], ["Enter", "open the row"], ["/", "search"], ["← →", "next and previous token"], ["u", "one level up"], ["t", "light or dark"], ["?", "this list"]];

function setTheme(theme: string): void {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("whet-theme", theme); } catch { /* a file has no storage in some browsers */ }
  window.dispatchEvent(new Event("theme"));
}

function toggleTheme(): void {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(dark ? "light" : "dark");
}

function App({ refused }: { refused: string | null }) {
  const { parts } = useRoute();
  const [out, setOut] = useState<string | null>(refused);
  const [help, setHelp] = useState(false);
  const run = parts[0] === "r" ? parts[1] : null;
  useEffect(() => {
    const signedOut = () => setOut("This browser has no session.");
    const key = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (/INPUT|SELECT|TEXTAREA/.test(target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "t") toggleTheme();
      else if (event.key === "?") setHelp((open) => !open);
      else if (event.key === "Escape") setHelp(false);
      else if (event.key === "u") {
        const up = parseHash(location.hash).parts;
        location.hash = href(up.length > 2 ? up.slice(0, -1) : []).slice(1);
      }
    };
    window.addEventListener("signed-out", signedOut);
    window.addEventListener("keydown", key);
    return () => {
      window.removeEventListener("signed-out", signedOut);
      window.removeEventListener("keydown", key);
    };
  }, []);
  useEffect(() => { document.title = run ? `${parts[3] ?? parts[2] ?? "curves"} · ${run} · whet` : "whet"; }, [parts.join("/")]);
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); document.getElementById("main")?.focus(); }}>to the content</a>
      <header class="top">
        <a class="brand" href={href([])}><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M5 23 13 13l5 4 9-10" /></svg>whet</a>
        {run && <RunName run={run} />}
        <span class="spacer" />
        <button class="icon" onClick={toggleTheme} title="light or dark (t)" aria-label="light or dark">◐</button>
        <button class="icon" onClick={() => setHelp(!help)} title="keys (?)" aria-label="keys" aria-expanded={help}>?</button>
      </header>
      {run && (
        <nav class="nav" aria-label="pages of the run">
          {TABS.map(([path, name]) => (
            <a key={path} href={href(path ? ["r", run, path] : ["r", run])} aria-current={(parts[2] ?? "") === path ? "page" : undefined}>{name}</a>
          ))}
        </nav>
      )}
      {help && <div class="help" role="note"><dl>{KEYS.map(([k, what]) => <div key={k}><dt><kbd>{k}</kbd></dt><dd>{what}</dd></div>)}</dl></div>}
      <main id="main" tabIndex={-1}>{out ? <SignedOut reason={out} /> : <Page parts={parts} />}</main>
    </>
  );
}

function RunName({ run }: { run: string }) {
  const { data } = useGet<Run>(runPath(run));
  return <span class="run-name"><a href={href(["r", run])}>{run}</a>{data?.state && <Status value={data.state} />}{isStatic && <span class="badge">file</span>}</span>;
}

function Page({ parts }: { parts: string[] }) {
  if (parts[0] !== "r" || !parts[1]) return <Runs />;
  const [, run, page, id] = parts;
  if (page === "rollouts" && id) return <Rollout key={`${run}/${id}`} run={run} id={id} />;
  if (page === "rollouts") return <Rollouts key={run} run={run} />;
  if (page === "queue") return <QueuePage key={run} run={run} />;
  if (page === "rewards") return <RewardHealth key={run} run={run} />;
  if (page === "evaluations") return <Evaluations key={run} run={run} />;
  if (page === "resources") return <Resources key={run} run={run} />;
  if (page === "doctor") return <DoctorPage key={run} run={run} />;
  return <Curves key={run} run={run} />;
}

function SignedOut({ reason }: { reason: string }) {
  return (
    <section class="signed-out">
      <h1>Open the link from the terminal</h1>
      <p>{reason}</p>
      <p><code>whet train</code> and <code>whet store</code> print a link when they start, and <code>whet view</code> prints a new one at any time. Each opens the dashboard once, in one browser.</p>
    </section>
  );
}

/** Exchanges the code of a link for a session, and removes it from the address. */
async function signIn(): Promise<string | null> {
  const route = parseHash(location.hash);
  const code = route.query.get("code");
  if (!code || isStatic) return null;
  history.replaceState(null, "", href(route.parts));
  try {
    await openSession(code);
    return null;
  } catch (error) {
    // A link that is opened twice in one browser is fine: the session of the first time lasts.
    const known = await fetch("/api/runs").then((reply) => reply.ok, () => false);
    return known ? null : (error as Error).message;
  }
}

const saved = (() => { try { return localStorage.getItem("whet-theme"); } catch { return null; } })();
if (saved) document.documentElement.dataset.theme = saved;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("theme")));
if (isStatic && !location.hash) {
  const name = Object.keys(JSON.parse(document.getElementById("data")?.textContent ?? "{}")).find((path) => /^\/api\/runs\/[^/]+$/.test(path));
  if (name) history.replaceState(null, "", href(["r", name.slice("/api/runs/".length)]));
}
void signIn().then((refused) => render(<App refused={refused} />, document.getElementById("app")!));
