/** The address after `#`: a path and a query, so that each state of a page is a link. */

import { useEffect, useState } from "preact/hooks";
import type { Query } from "./api";

export type Route = { parts: string[]; query: URLSearchParams };

export function parseHash(hash: string): Route {
  const [path, search] = hash.replace(/^#/, "").split("?", 2);
  return {
    parts: path.split("/").filter(Boolean).map(decode),
    query: new URLSearchParams(search ?? ""),
  };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function href(parts: (string | number)[], query: Query = {}): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) {
      search.set(key, String(value));
    }
  }
  const text = search.toString();
  const path = parts.map((part) => encodeURIComponent(String(part))).join("/");
  return `#/${path}${text ? `?${text}` : ""}`;
}

export function go(address: string): void {
  window.location.hash = address.replace(/^#/, "");
}

/** Changes parameters of the present address without a new entry in the history. */
export function setQuery(changes: Query): void {
  const route = parseHash(window.location.hash);
  const query: Query = Object.fromEntries(route.query);
  history.replaceState(null, "", href(route.parts, { ...query, ...changes }));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parseHash(window.location.hash));
  useEffect(() => {
    const changed = () => setRoute(parseHash(window.location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}
