// A plan: the places of states, the time and memory of a step. Of a job, beside what was measured.

import { byId, make, setOptional, setPairs, setText } from "../support/dom.js";
import * as format from "../support/format.js";

const GIB = 2 ** 30;
const TIERS = { gpu: "Device memory", host: "Host buffers", ssd: "SSD space" };
const RESTS = { gpu: "on the device", host: "in host memory", ssd: "on the SSDs" };
const RESOURCES = {
  compute: "the device computes",
  h2d: "copies to the device",
  d2h: "copies from the device",
  ssd: "SSDs",
  optimizer: "the CPU updates",
  host_memory: "host memory",
};
const FATES = { kept: "kept on the device", swapped: "swapped", recomputed: "computed again" };

// The label and the meaning of each choice, by its name, for plans whose device is the CPU and for those with a GPU.
const CHOICES = JSON.parse(byId("planner").dataset.choices);
const shown = new Map(); // by prefix of the elements: the plan whose details they show; a new plan is a new object

/** Shows a job's plan beside its measured values. Either is null if there is none yet. */
export function renderPlan(plan, measured) {
  const isRefused = plan?.feasible === false;
  byId("refusal-panel").hidden = !isRefused;
  if (isRefused) renderRefusal("refusal", plan);
  const isPlanned = plan?.feasible === true;
  byId("plan-panel").hidden = !isPlanned && !measured;
  if (byId("plan-panel").hidden) return;
  setText(byId("plan-title"), isPlanned ? "Plan" : "Measured");
  renderNumbers(plan, measured);
  byId("plan-details").hidden = !isPlanned;
  if (isPlanned) renderDetails("plan", plan);
}

/** Shows what a job lacks that does not fit, in the elements whose ids begin with `prefix`. */
export function renderRefusal(prefix, { missing_bytes: missing, missing_together: together, reasons }) {
  const pairs = Object.entries(missing ?? {}).filter(([, bytes]) => bytes > 0);
  // Of several shortages either all must be made up for, or one of them is enough.
  const or = (index) => (index > 0 && together === false ? "or " : "");
  const texts = pairs.map(([tier, bytes], index) => [TIERS[tier], `${or(index)}${format.bytes(bytes)} too little`]);
  setPairs(byId(`${prefix}-missing`), texts);
  const changes = reasons.filter((reason) => reason.startsWith("it fits with"));
  setOptional(byId(`${prefix}-why`), reasons.slice(1).filter((reason) => !changes.includes(reason)).join("; ") || null);
  byId(`${prefix}-hint`).hidden = changes.length === 0;
  setItems(byId(`${prefix}-changes`), changes);
}

function renderNumbers(plan, measured) {
  const predicted = plan?.predicted ?? null;
  const rows = [cellsOf("A step", seconds, predicted?.step_s, measured?.step_s)];
  const recent = measured?.recent;
  if (recent) rows.push(cellsOf(`The last ${recent.num_steps} steps`, seconds, predicted?.step_s, recent.step_s));
  for (const [tier, name] of Object.entries(TIERS)) {
    const [promised, limit] = [predicted?.peak_gib[tier], plan?.limit_gib?.[tier]].map((gib) => gib && gib * GIB);
    rows.push(cellsOf(name, format.bytes, promised, measured?.peak_bytes[tier], limit));
  }
  fill(byId("plan-numbers"), rows, ([name, ...cells]) => {
    const row = make("tr");
    const head = make("th", name);
    head.scope = "row";
    row.append(head, ...cells.map((text) => make("td", text)));
    return row;
  });
  hideEmptyColumns(byId("plan-numbers"), rows);
  const steps = measured?.num_steps ?? 0;
  const notes = [
    predicted && steps < plan.min_measured_steps &&
      `The predicted step is an estimate until ${plan.min_measured_steps} steps are measured.`,
    predicted?.step_s_low != null && steps < plan.min_measured_steps &&
      `It likely takes ${range(predicted)}.`,
    steps > 0 && `The measured step is the mean of ${format.whole(steps)} steps.`,
    recent?.step_s_low != null && `The next steps likely take ${range(recent)}.`,
    isOnCpu(measured) && "Measured device memory of a CPU includes what the worker's process needs for itself.",
  ];
  setOptional(byId("plan-note"), notes.filter(Boolean).join(" ") || null);
}

/** Only a GPU's allocator reserves memory. */
const isOnCpu = (measured) => measured?.peak_bytes.gpu != null && measured.peak_bytes.gpu_reserved == null;

/** Hides the columns that are empty in all rows. */
function hideEmptyColumns(body, rows) {
  const heads = body.closest("table").tHead.rows[0];
  for (let column = 1; column < heads.cells.length; column++) {
    const isEmpty = rows.every((cells) => [format.small(null), "", null, undefined].includes(cells[column]));
    for (const row of [heads, ...body.rows]) row.cells[column].hidden = isEmpty;
  }
}

/** Shows the choices of a plan and what bounds its step, in the elements whose ids begin with `prefix`. */
export function renderDetails(prefix, plan) {
  if (shown.get(prefix) === plan) return;
  shown.set(prefix, plan);
  const part = (name) => byId(`${prefix}-${name}`);
  const states = spread(plan.choices?.states, "blocks");
  const layers = spread(plan.choices?.activations, "layers");
  part("picture").hidden = states.length === 0;
  part("states").replaceChildren(...states.map((run, block) => stateCell(run, block, states.length)));
  // Layers stand below their blocks; the embedding and the head have no choice.
  const cells = layers.map((run, layer) => activationsCell(run, layer));
  part("activations").replaceChildren(make("span", "", "cell"), ...cells, make("span", "", "cell"));
  const rests = (plan.choices?.states ?? []).map((run) => `blocks ${run.blocks} ${RESTS[run.rest_on]}`);
  part("states").setAttribute("aria-label", `Model states: ${rests.join(", ")}`);
  const fates = (plan.choices?.activations ?? []).map((run) => `layers ${run.layers}: ${fatesOf(run).join(", ")}`);
  part("activations").setAttribute("aria-label", `Activations: ${fates.join("; ")}`);
  renderBusy(part("busy"), plan);
  const { num_microbatches: parts, group_size: together, gpus } = plan.choices ?? {};
  const groups = parts > 1 ? ` ${parts} micro-batches a step, ${together} of which go through the blocks together.` : "";
  const isCpu = isCpuPlan(plan);
  const devices = gpus > 1 ? ` ${gpus} ${isCpu ? "devices" : "GPUs"}.` : "";
  const lengths = plan.example_tokens ? lengthsOf(plan.example_tokens) : "";
  setOptional(part("summary"), `${format.rate(plan.tokens_per_s)} tokens a second.${devices}${lengths}${groups}`);
  setItems(part("reasons"), plan.reasons);
  const inWords = CHOICES[isCpu ? "cpu" : "gpu"];
  const choices = Object.entries(plan.choices ?? {}).filter(([name]) => name in inWords);
  part("all-choices").hidden = choices.length === 0;
  fill(part("choices"), choices, ([name, value]) => {
    const row = make("tr");
    const head = make("th", inWords[name].label);
    head.scope = "row";
    row.append(head, make("td", choiceOf(value)), make("td", inWords[name].meaning));
    return row;
  });
}

/** Only a plan with a GPU tells apart what passes the host's memory. Plans of older releases do not. */
const isCpuPlan = ({ busy_s: busy, peak_limit_gib: limits }) =>
  busy != null && limits != null && !("host_memory" in busy);

function choiceOf(value) {
  if (value === null || typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  return Number.isInteger(value) ? format.whole(value) : format.small(value);
}

function lengthsOf({ limit, widest, mean, of_data: isOfData }) {
  if (!isOfData) return ` Every example is taken to have ${format.whole(limit)} tokens.`;
  return ` Examples have ${format.whole(mean)} tokens on average, ${format.whole(widest)} at most, with padding.`;
}

function renderBusy(list, { busy_s: busy, step_s: step, bottleneck }) {
  list.replaceChildren(
    ...Object.entries(busy ?? {}).map(([name, busySeconds]) => {
      const item = make("li", "", name === bottleneck ? "busiest" : "");
      const meter = make("progress", "", "planned");
      const title = RESOURCES[name] ?? name;
      meter.value = step > 0 ? Math.min(1, busySeconds / step) : 0;
      meter.setAttribute("aria-label", `${title}: planned share of the step`);
      item.append(make("span", title), meter, make("span", percent(busySeconds / step), "share"));
      return item;
    }),
  );
}

function stateCell(run, block, numBlocks) {
  const cell = make("span", "", `cell rest-${run.rest_on}`);
  const name = block === 0 ? "embedding" : block === numBlocks - 1 ? "head" : `layer ${block - 1}`;
  const more = [run.in_pieces && "comes to the device in pieces", run.grads_on_ssd && "gradients wait on the SSDs"];
  cell.title = [`block ${block}, ${name}: states ${RESTS[run.rest_on]}`, ...more.filter(Boolean)].join("; ");
  if (run.in_pieces) cell.classList.add("in-pieces");
  return cell;
}

function activationsCell(run, layer) {
  const cell = make("span", "", "cell");
  for (const fate of Object.keys(FATES)) {
    const mib = run[`${fate}_mib`];
    if (!mib) continue;
    const part = make("span", "", fate);
    part.style.flexGrow = mib;
    cell.append(part);
  }
  cell.title = `layer ${layer}: ${fatesOf(run).join(", ")} for each micro-batch`;
  return cell;
}

const fatesOf = (run) =>
  Object.entries(FATES)
    .filter(([fate]) => run[`${fate}_mib`])
    .map(([fate, words]) => `${format.bytes(run[`${fate}_mib`] * 2 ** 20)} ${words}`);

/** Repeats each run, such as {blocks: "0-3", …}, once for each of its numbers. */
function spread(runs, key) {
  return (runs ?? []).flatMap((run) => {
    const [first, last = first] = run[key].split("-").map(Number);
    return Array(last - first + 1).fill(run);
  });
}

export const setItems = (list, texts) => fill(list, texts, (text) => make("li", text));

/** Makes an element's children. Unchanged ones are kept, so that the user's selection stays. */
export function fill(parent, rows, makeRow) {
  const key = JSON.stringify(rows);
  if (parent.dataset.key === key) return;
  parent.dataset.key = key;
  parent.replaceChildren(...rows.map(makeRow));
}

function cellsOf(name, show, promised, found, limit = null) {
  return [name, show(promised), show(found), difference(promised, found), limit === null ? "" : show(limit)];
}

export const seconds = (value) => (value == null ? format.small(null) : `${format.small(value)} s`);
export const range = ({ step_s_low: low, step_s_high: high }) => `${format.small(low)} to ${format.small(high)} s`;
export const percent = (share) => `${Math.round(100 * share)} %`;

function difference(promised, found) {
  if (!promised || found == null) return "";
  if (found >= 2 * promised) return `${format.small(found / promised)} times`;
  const share = Math.round(1000 * (found / promised - 1)) / 10;
  return `${share > 0 ? "+" : ""}${share} %`;
}
