// The last step beside the planned one: how long each resource was busy, and why the device waited.

import { byId, make, setOptional, setText } from "../support/dom.js";
import * as format from "../support/format.js";

const NAMES = { compute: "computes", h2d: "copies in", d2h: "copies out" };
// The causes of docs/timeline.md.
const CAUSES = {
  copy_params: "params being copied in",
  read_params: "params being read",
  params_queue: "params waiting for their turn",
  update: "the block's update",
  update_queue: "other blocks' updates",
  commit: "a commit",
  no_operation: "the scheduler",
  grad_buffer: "earlier gradients leaving",
  other_box: "another box",
  between: "between operations",
};
// Smaller shares of a step are not shown.
const LEAST_SHARE = 0.01;

/**
 * Shows a step's summary beside the simulated step's. Either is null if there is none. `traces`: the URLs of their
 * whole timelines, and the names of the files.
 */
export function renderTimeline(summary, planned, traces) {
  byId("timeline-panel").hidden = !summary && !planned;
  if (byId("timeline-panel").hidden) return;
  setText(byId("timeline-title"), summary ? "Busy in the last step" : "Busy in a step, as planned");
  renderBars(summary, planned);
  const took = [summary && tookOf(summary), planned && plannedOf(planned)];
  setText(byId("timeline-summary"), took.filter(Boolean).join(" "));
  setOptional(byId("timeline-waits"), summary && !summary.boxes && waitsOf(summary));
  setOptional(byId("timeline-boxes"), summary?.boxes_in_words && `${summary.boxes_in_words}.`);
  const lines = summary?.boxes?.map((box) => boxInWords(box, summary.period_s)) ?? [];
  byId("timeline-each-box").replaceChildren(...lines.map((line) => make("li", line)));
  setTrace(byId("timeline-trace"), summary && traces.measured);
  setTrace(byId("timeline-planned-trace"), planned && traces.planned);
}

function renderBars(summary, planned) {
  const list = byId("timeline-bars");
  const steps = [summary, planned];
  const names = new Set(steps.flatMap((step) => Object.keys(step?.busy_s ?? {})));
  const groups = byBox(names, steps);
  const key = JSON.stringify([groups, steps.map(Boolean)]);
  if (list.dataset.key !== key) {
    list.dataset.key = key;
    const isCpu = isOnCpu(steps);
    const bars = groups.map(({ box, title, resources }) => [
      ...(title === null ? [] : [make("li", title, "box-title")]),
      ...resources.map((name) => bar(titleOf(name, isCpu, box), box, summary !== null, planned !== null)),
    ]);
    list.replaceChildren(...bars.flat());
  }
  const items = list.querySelectorAll("li:not(.box-title)");
  groups.flatMap(({ resources }) => resources).forEach((name, index) => {
    const item = items[index];
    const shares = steps.map((step) => (step && step.period_s > 0 ? (step.busy_s[name] ?? 0) / step.period_s : null));
    const meters = [...item.querySelectorAll("progress")];
    const known = shares.filter((share) => share !== null);
    known.forEach((share, which) => (meters[which].value = share));
    setText(item.lastChild, known.map(percent).join(" · "));
    item.classList.toggle("busiest", name === (summary ?? planned).busiest);
  });
  const isBoth = summary !== null && planned !== null;
  list.classList.toggle("both", isBoth);
  byId("timeline-keys").hidden = !isBoth;
}

function tookOf({ period_s: period, dependency_bound_s: bound }) {
  // The chain's parts may have run in several steps, so it may be longer than this step.
  const chain = bound < period ? `takes ${format.small(bound)} s` : "takes as long";
  const least = bound === null ? "" : `; its longest chain of work that must be serial ${chain}`;
  return `The step took ${format.small(period)} s${least}.`;
}

const plannedOf = ({ period_s: period }) => `Simulated, it takes ${format.small(period)} s.`;

function waitsOf({ period_s: period, stall_s: stalls }) {
  const waits = Object.entries(stalls)
    .filter(([, seconds]) => seconds > LEAST_SHARE * period)
    .sort(([, a], [, b]) => b - a)
    .map(([cause, seconds]) => `${CAUSES[cause] ?? format.words(cause)} ${percent(seconds / period)}`);
  return waits.length ? `The device waited for: ${waits.join(", ")}.` : null;
}

/** Describes how one box of several used a step. */
function boxInWords({ box, compute_s: compute, stall_s: stalls, waits_for_s: waits }, period) {
  const own = Object.entries(stalls).filter(([cause]) => cause !== "other_box");
  const parts = [...Object.entries(waits), ...own.map(([cause, seconds]) => [CAUSES[cause] ?? format.words(cause), seconds])]
    .filter(([, seconds]) => seconds > LEAST_SHARE * period)
    .sort(([, a], [, b]) => b - a)
    .map(([what, seconds]) => `${what} ${percent(seconds / period)}`);
  const waited = parts.length ? `, and waited for: ${parts.join(", ")}` : "";
  return `${box} computed ${percent(compute / period)} of the step${waited}.`;
}

function setTrace(link, trace) {
  link.hidden = !trace;
  if (!trace) return;
  link.href = trace.url;
  link.download = trace.name;
}

const percent = (share) => `${Math.round(100 * share)} %`;

/** Returns whether steps, some of which may be null, ran on the CPU: such steps copy nothing to a device. */
export const isOnCpu = (steps) =>
  !steps.some((step) => Object.keys(step?.busy_s ?? {}).some((name) => name.endsWith("/h2d")));

/**
 * Returns a step's resources in groups: one for each box of several, in their order, then the links between them. The
 * group of a job on one box has no title. `steps`: summaries, some of which may be null.
 */
export function byBox(resources, steps) {
  const names = [...resources].sort();
  // The measured step may be of other boxes than the planned one: the states have been moved since.
  const boxes = [...new Set(steps.flatMap((step) => step?.boxes?.map(({ box }) => box) ?? []))];
  if (boxes.length === 0) return [{ box: null, title: null, resources: names }];
  const isOf = (box) => (name) => name.startsWith(`${box}/`);
  const groups = boxes.map((box) => ({ box, title: box, resources: names.filter(isOf(box)) }));
  const links = names.filter((name) => !boxes.some((box) => isOf(box)(name)));
  if (links.length) groups.push({ box: null, title: "between boxes", resources: links });
  return groups;
}

/** The display name of a step's resource, below the title of its box if it has one. */
export function titleOf(resource, isCpu, box = null) {
  const name = box === null ? resource : resource.slice(box.length + 1);
  const [worker, part] = name.split("/");
  return part ? `${isCpu ? "CPU" : worker} ${NAMES[part] ?? part}` : worker;
}

function bar(title, box, isMeasured, isPlanned) {
  const item = make("li");
  const meters = make("span", "", "meters");
  const label = box === null ? title : `${box}: ${title}`;
  if (isMeasured) meters.append(meter(`${label}: busy share of the step`));
  if (isPlanned) meters.append(meter(`${label}: planned share of the step`, "planned"));
  item.append(make("span", title), meters, make("span", "", "share"));
  return item;
}

function meter(label, className = "") {
  const element = make("progress", "", className);
  element.setAttribute("aria-label", label);
  return element;
}
