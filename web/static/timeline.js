// What the time of the last step went to: how long each resource was busy, and why the device waited.

import { byId, make, setOptional, setText } from "./dom.js";
import * as format from "./format.js";

const NAMES = { compute: "computes", h2d: "copies in", d2h: "copies out" };
// In the words of docs/timeline.md.
const CAUSES = {
  copy_params: "params being copied in",
  read_params: "params being read",
  params_queue: "params waiting for their turn",
  update: "the block's update",
  update_queue: "other blocks' updates",
  commit: "a commit",
  no_operation: "the scheduler",
  grad_buffer: "earlier gradients leaving",
  between: "between operations",
};
// Smaller shares of a step are not worth a word.
const LEAST_SHARE = 0.01;

/** Show a step's summary, null for none; `trace`: where its whole timeline is, and the name of the file. */
export function renderTimeline(summary, trace) {
  byId("timeline-panel").hidden = !summary;
  if (!summary) return;
  const { period_s: period, busy_s: busy, stall_s: stalls } = summary;
  const list = byId("timeline-bars");
  const names = Object.keys(busy).sort();
  if (list.dataset.names !== names.join()) {
    list.dataset.names = names.join();
    list.replaceChildren(...names.map(bar));
  }
  names.forEach((name, index) => {
    const [, meter, share] = list.children[index].children;
    meter.value = period > 0 ? busy[name] / period : 0;
    setText(share, percent(meter.value));
    list.children[index].classList.toggle("busiest", name === summary.busiest);
  });
  const bound = summary.dependency_bound_s;
  const least = bound === null ? "" : `; its longest chain of work that must be serial takes ${format.small(bound)} s`;
  setText(byId("timeline-summary"), `The step took ${format.small(period)} s${least}.`);
  const waits = Object.entries(stalls)
    .filter(([, seconds]) => seconds > LEAST_SHARE * period)
    .sort(([, a], [, b]) => b - a)
    .map(([cause, seconds]) => `${CAUSES[cause] ?? format.words(cause)} ${percent(seconds / period)}`);
  setOptional(byId("timeline-waits"), waits.length ? `The device waited for: ${waits.join(", ")}.` : null);
  byId("timeline-trace").href = trace.url;
  byId("timeline-trace").download = trace.name;
}

const percent = (share) => `${Math.round(100 * share)} %`;

function bar(name) {
  const item = make("li");
  const [actor, part] = name.split("/");
  const title = part ? `${actor} ${NAMES[part] ?? part}` : actor;
  const meter = make("progress");
  meter.setAttribute("aria-label", `${title}: busy share of the step`);
  item.append(make("span", title), meter, make("span", "", "share"));
  return item;
}
