// The page that tries a job before it exists: a form, and the plan of what it says now.

import * as api from "../support/api.js";
import { curl, jsonBody, quoted } from "../support/commands.js";
import { byId, make, setOptional, setPairs, setText } from "../support/dom.js";
import * as format from "../support/format.js";
import { askForPlan, listMachines, listModels, listShapes } from "../support/plans.js";
import { fill, percent, range, renderDetails, renderRefusal, seconds, setItems } from "./plan.js";
import { PlanForm } from "./plan_form.js";

const DELAY_MS = 150; // after the last change
const SAME = 0.01; // share by which two steps may differ and still take the same time
const DEFAULT_LENGTH = 2048; // of examples, unless the model takes less
const FEW_TIMES = 1.1; // below it a speedup is told in percent
const TIERS = { gpu: "GPU", host: "RAM", ssd: "SSDs" };
const GIB = 2 ** 30;
const ENOUGH_OTHER = "with enough of the other memory"; // the planner's words where this machine has too little of it
const MIN_COMPARED = 10; // jobs of this machine from which on "nine of ten" is said
const WHAT_IF_NOTE = "More RAM, one more SSD, a faster card, other settings and so on, each planned alone. It takes some seconds.";
const NO_ANSWER = "The service did not answer.";
const GAIN_NOTE = "The largest gain comes first.";
const BY_RATES_NOTE = " Times follow from this machine's rates until it is measured.";

export class PlanPage {
  #isShown = false;
  #hasForm = false;
  #form;
  #timer = null;
  #asking = null; // AbortController of the question whose answer is awaited
  #last = null; // { plan, values } of the last plan that was no estimate
  #before = null; // the one before it, with other values

  /** `route`: the address of the page, up to its query. */
  constructor(route) {
    this.route = route;
    this.#form = new PlanForm(() => this.#onChange());
    byId("try-what-if").addEventListener("click", () => this.#askWhatIf());
    byId("try-measure").addEventListener("click", () => this.#measure());
    byId("try-retry").addEventListener("click", () => this.#open());
    byId("try-reset").href = route;
    addEventListener("hashchange", () => this.#onAddress());
  }

  /** Shows or hides the page. */
  show(isShown) {
    const begins = isShown && !this.#isShown;
    this.#isShown = isShown;
    byId("planner").hidden = !isShown;
    if (begins) this.#open();
    if (!isShown) this.#stop();
  }

  async #open() {
    byId("try-retry").disabled = true;
    try {
      const [models, shapes, machines] = await Promise.all([listModels(), listShapes(), listMachines()]);
      if (!this.#isShown) return;
      this.#form.fill(models.data.map(({ id }) => id), shapes.data, machines.data, this.#query);
      this.#hasForm = true;
    } catch (error) {
      setOptional(byId("try-problem"), error instanceof api.Refusal ? error.message : NO_ANSWER);
      byId("try-retry").hidden = false;
      return;
    } finally {
      byId("try-retry").disabled = false;
    }
    byId("try-retry").hidden = true;
    byId("to-plan").href = location.hash;
    setOptional(byId("try-problem"), null);
    byId("try-columns").hidden = false;
    this.#ask();
  }

  get #query() {
    return location.hash.split("?")[1] ?? "";
  }

  /** The address was changed by hand, or by going back. */
  #onAddress() {
    if (!this.#isShown || !this.#hasForm || location.hash.split("?")[0] !== this.route) return;
    if (this.#query === this.#form.query) return;
    this.#form.read(this.#query);
    byId("to-plan").href = location.hash;
    byId("try-use").hidden = true;
    this.#ask();
  }

  #onChange() {
    this.#stop();
    history.replaceState(null, "", `${this.route}?${this.#form.query}`);
    byId("to-plan").href = location.hash; // who comes back finds the form as it was
    byId("try-use").hidden = true; // its commands are those of the plan before
    byId("try-answer").setAttribute("aria-busy", "true");
    this.#timer = setTimeout(() => this.#ask(), DELAY_MS);
  }

  /** Drops the answer that is awaited. */
  #stop() {
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#asking = null;
    byId("try-what-if").disabled = false;
  }

  /** Asks for a plan. This machine is measured for it only if the user asks for that, because it takes all cores. */
  async #ask({ whatIf = false, measure = false } = {}) {
    this.#stop();
    const asking = new AbortController();
    this.#asking = asking;
    const { signal } = asking;
    const values = this.#form.values;
    byId("try-answer").setAttribute("aria-busy", "true");
    try {
      const { body, machineName, hardware } = await this.#form.question();
      if (signal.aborted) return;
      // An estimate of what is already shown exactly would be a step back.
      const isKnown = this.#last !== null && this.#form.changesFrom(this.#last.values).length === 0;
      const onEstimate = (plan) => !signal.aborted && !isKnown && this.#showPlan(plan, true);
      const show = (plan) => {
        this.#keep(plan, values);
        this.#showPlan(plan, false);
        this.#showCommands(plan, body, machineName, hardware);
      };
      const onPlan = (plan) => !signal.aborted && !isKnown && show(plan);
      const onProgress = (progress) => !signal.aborted && this.#showMeasuring(progressInWords(progress), false);
      const onChanges = (plan) => !signal.aborted && this.#showPlan(plan, false);
      const asked = { ...body, measure, ...(whatIf && { what_if: true }) };
      const plan = await askForPlan(asked, { signal, onEstimate, onPlan, onProgress, onChanges });
      if (signal.aborted) return;
      show(plan);
    } catch (error) {
      if (signal.aborted) return;
      this.#showProblem(error);
    }
    this.#asking = null;
    byId("try-what-if").disabled = false;
    byId("try-answer").setAttribute("aria-busy", "false");
  }

  /** Measures this machine for the plan that is shown, and plans again. */
  #measure() {
    this.#showMeasuring("Measuring…", false);
    this.#ask({ measure: true, whatIf: this.#last.plan.what_if != null });
  }

  #askWhatIf() {
    setText(byId("try-what-if-note"), "Planning each change…");
    this.#ask({ whatIf: true });
    byId("try-what-if").disabled = true;
  }

  /** Keeps a plan, and the one before it, for comparison. */
  #keep(plan, values) {
    if (this.#last && this.#form.changesFrom(this.#last.values).length > 0) this.#before = this.#last;
    this.#last = { plan, values };
  }

  // --- what is shown ---

  #showProblem(error) {
    this.#showLast();
    const isOfField = this.#form.showError(error);
    const told = error instanceof api.Refusal ? error.message : NO_ANSWER;
    setOptional(byId("try-problem"), isOfField ? null : told);
    byId("try-retry").hidden = isOfField;
    setText(byId("try-headline"), isOfField ? "One setting is wrong; it is marked in the form" : "There is no plan");
  }

  /** Shows the last plan as an old one. What is shown so far may be an estimate for settings that failed. */
  #showLast() {
    const last = this.#last;
    if (last) this.#showPlan(last.plan, false);
    else renderWhatIf({ what_if: null });
    const inHead = ["figures", "warnings", "job-time", "bound", "sure"].map((name) => byId(`try-${name}`));
    const panels = byId("try-answer").querySelectorAll(":scope > .panel:not(.try-head)");
    for (const part of [...inHead, ...panels]) part.hidden ||= !last;
    this.#showMeasuring(null, false);
    byId("try-use").hidden = true;
    byId("try-answer").classList.add("is-old");
    setOptional(byId("try-delta"), null);
    const changes = last ? this.#form.changesFrom(last.values).join(", ") : "";
    setOptional(byId("try-old"), last && `The numbers below are of the last plan${changes && `, before: ${changes}`}.`);
  }

  #showPlan(plan, isEstimate) {
    setOptional(byId("try-problem"), null);
    byId("try-retry").hidden = true;
    setOptional(byId("try-old"), null);
    this.#form.showError(null);
    byId("try-answer").classList.remove("is-old");
    byId("try-answer").classList.toggle("is-estimate", isEstimate);
    setText(byId("try-headline"), headlineOf(plan, isEstimate));
    const before = isEstimate ? null : this.#before;
    setOptional(byId("try-delta"), before && `${comparison(before.plan, plan)} (${this.#form.changesFrom(before.values).join(", ")})`);
    byId("try-delta").dataset.trend = before ? trendOf(before.plan, plan) : "";
    byId("try-figures").hidden = !plan.feasible;
    if (plan.feasible) setPairs(byId("try-figures"), figuresOf(plan, isEstimate));
    setOptional(byId("try-job-time"), isEstimate ? null : jobTime(plan));
    setOptional(byId("try-bound"), plan.feasible ? plan.reasons?.[0] : null);
    setOptional(byId("try-sure"), isEstimate ? null : sureness(plan));
    this.#showMeasuring(plan.measuring_s == null ? null : unmeasured(plan), true);
    byId("try-warnings").hidden = !plan.warnings?.length;
    setItems(byId("try-warnings"), plan.warnings ?? []);
    byId("try-refusal").hidden = plan.feasible;
    if (!plan.feasible) renderRefusal("try-refusal", plan);
    renderMemory(plan);
    byId("try-details").hidden = !plan.feasible;
    if (plan.feasible) renderDetails("try", plan);
    byId("try-what-if-panel").hidden = false;
    renderWhatIf(plan);
  }

  /** Tells of times that lack, or of their measurement. Null: there is nothing to tell. */
  #showMeasuring(told, canBegin) {
    setText(byId("try-measuring"), told ?? "");
    byId("try-measure").hidden = !canBegin;
    byId("try-unmeasured").hidden = told === null;
  }

  #showCommands(plan, body, machineName, hardware) {
    const settings = plan.job_settings;
    byId("try-use").hidden = false;
    byId("try-use-job").hidden = !settings;
    if (settings) {
      setText(byId("try-settings"), JSON.stringify(settings, null, 2));
      // A job needs the files of its model, which a shape does not have.
      const request = { model: this.#form.isModelHere ? body.model : "MODEL", training_file: "FILE_ID", windlass: settings };
      setText(byId("try-curl"), curl("/v1/fine_tuning/jobs", ...jsonBody(request, 2)));
    }
    setText(byId("try-command"), commandOf(plan, body, machineName, hardware));
  }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

const progressInWords = ({ message, done, total }) => {
  const told = capital(message);
  return total == null ? `${told}…` : `${told} (${done + 1} of ${total})…`;
};

function headlineOf(plan, isEstimate) {
  if (!plan.feasible) return capital(plan.reasons?.[0] ?? "It does not fit");
  if (plan.to_be_measured) return `It fits: about ${seconds(plan.step_s)} a step by this machine's rates, being measured…`;
  if (plan.measuring_s != null && plan.times_from === "rates") return `It fits: about ${seconds(plan.step_s)} a step by this machine's rates`;
  if (isEstimate) return `It fits: at least ${seconds(plan.step_s)} a step, being simulated…`;
  return `It fits: ${seconds(plan.step_s)} a step`;
}

function figuresOf(plan, isEstimate) {
  const { choices, step_s_low: low } = plan;
  const [atLeast, atMost] = plan.to_be_measured ? ["≈ ", "≈ "] : isEstimate ? ["≥ ", "≤ "] : ["", ""];
  return [
    ["A step", `${atLeast}${seconds(plan.step_s)}`, "From one update of all params to the next"],
    ["Likely", isEstimate || low == null ? format.small(null) : range(plan), "The range of a step's time, as far as is known"],
    ["Tokens a second", `${atMost}${format.rate(plan.tokens_per_s)}`, "That a step computes"],
    ["Written to SSDs a step", format.written(plan.ssd_write_gb_per_step), "To all SSDs together; it wears them"],
    [
      "Micro-batches",
      choices?.num_microbatches ? String(choices.num_microbatches) : format.small(null),
      "Parts in which the batch of a step is computed",
    ],
  ];
}

function jobTime(plan) {
  const { num_steps: number, job_s: total, ssd_write_tb: terabytes, ssd_endurance_percent: worn, hardware } = plan;
  if (total == null) return null;
  const time = `The whole job: ${format.duration(total)} for ${format.whole(number)} steps, without loading and evaluations.`;
  if (terabytes == null) return time;
  const gb = terabytes * 1000;
  const count = hardware.ssds.count;
  const each = count > 1 ? `, ${format.written(gb / count)} to each of ${count} SSDs` : "";
  const rated = worn == null ? "" : `, ${format.small(worn)} % of the ${count > 1 ? "least rated" : "rated"} endurance`;
  return `${time} It writes ${format.written(gb)}${each}${rated}.`;
}

/** Tells how sure the range is, with the command's words: see `planner/predictions/confidence.py`. */
function sureness({ feasible, times_from: source, num_compared: number }) {
  if (!feasible || !source) return null;
  if (number >= MIN_COMPARED) return `The range holds in nine of ten jobs, by ${number} jobs of this machine.`;
  const compared = { 0: "no job of this machine was", 1: "one job of this machine was" }[number ?? 0] ?? `${number} jobs of this machine were`;
  const rates = source === "rates" ? "it follows from the machine's rates, and " : "";
  return `The range is likely: ${rates}${compared} compared.`;
}

/** Tells that times of the model are not measured on this machine, and how long that takes. */
const unmeasured = ({ measuring_s: time }) =>
  "Not all times of this model are measured: those that lack follow from this machine's rates. " +
  `Measuring takes about ${format.duration(time)} on all cores. It takes longer beside jobs, and slows them.`;

const tokensOf = ({ step_s, tokens_per_s }) => step_s * tokens_per_s;
const isNear = (ratio) => Math.abs(ratio - 1) <= SAME;

/** How many times as fast the plan is: by its steps, or by tokens if its steps have another number of them. */
function speedup(before, plan) {
  const isOtherBatch = !isNear(tokensOf(plan) / tokensOf(before));
  return [isOtherBatch ? plan.tokens_per_s / before.tokens_per_s : before.step_s / plan.step_s, isOtherBatch];
}

function comparison(before, plan) {
  if (!plan.feasible) return before.feasible ? "It fitted before" : "It did not fit before, either";
  if (!before.feasible) return "It fits now";
  const [ratio, isOfTokens] = speedup(before, plan);
  if (isNear(ratio)) return isOfTokens ? "As many tokens a second as before" : "As fast as before";
  const larger = ratio > 1 ? ratio : 1 / ratio;
  const times = larger < FEW_TIMES ? percent(larger - 1) : `${format.small(larger)}x`;
  const how = isOfTokens ? (ratio > 1 ? "more tokens a second" : "fewer tokens a second") : ratio > 1 ? "faster" : "slower";
  return `${times} ${how} than before`;
}

function trendOf(before, plan) {
  if (!plan.feasible || !before.feasible) return plan.feasible ? "better" : before.feasible ? "worse" : "";
  const [ratio] = speedup(before, plan);
  return isNear(ratio) ? "" : ratio > 1 ? "better" : "worse";
}

function renderMemory({ peak_gib: peak, peak_limit_gib: rooms, hardware, least_gpu_gib: least, least_gpu_reason: why }) {
  byId("try-memory-panel").hidden = !peak && least == null;
  const tiers = Object.keys(TIERS).filter((tier) => peak?.[tier] != null && (tier !== "gpu" || hardware.gpus.count > 0));
  fill(byId("try-memory"), tiers.map((tier) => [TIERS[tier], peak[tier], rooms[tier]]), ([name, used, room]) => {
    const item = make("li", "", used > room ? "warns" : "");
    const meter = make("progress");
    meter.value = Math.min(1, used / room);
    meter.setAttribute("aria-label", `${name}: share in use at the peak`);
    const told = `${format.bytes(used * GIB)} of ${format.bytes(room * GIB)}`;
    item.append(make("span", name, "bar-name"), meter, make("span", told, "share"));
    return item;
  });
  byId("try-least").hidden = least == null;
  const others = why?.includes(ENOUGH_OTHER) ? ENOUGH_OTHER : "with all else as it is";
  setText(byId("try-least-gib"), `The least GPU memory for this job is ${format.bytes(least * GIB)}, ${others}`);
  setText(byId("try-least-why"), why ?? "");
}

function renderWhatIf({ what_if: changes, measuring_s: unmeasuredSeconds = null, num_changes_left: left = 0 }) {
  byId("try-what-if-table").hidden = !changes?.length;
  const note = changes ? GAIN_NOTE + (unmeasuredSeconds === null ? "" : BY_RATES_NOTE) : WHAT_IF_NOTE;
  setText(byId("try-what-if-note"), left ? `Planning ${left} more ${left === 1 ? "change" : "changes"}…` : note);
  fill(byId("try-what-if-rows"), changes ?? [], ({ change, feasible, step_s: step, tokens_per_s: rate, gain, problem }) => {
    const row = make("tr");
    const head = make("th", change);
    head.scope = "row";
    const gained = gain == null ? format.small(null) : `${gain > 0 ? "+" : ""}${percent(gain)}`;
    const cells = feasible ? [seconds(step), format.rate(rate), gained] : [problem ?? "does not fit", "", ""];
    row.append(head, ...cells.map((text) => make("td", text)));
    return row;
  });
}

/** The command line that asks the same question. */
function commandOf(plan, body, machineName, hardware) {
  const { model, batch_size: batch, windlass } = body;
  const length = plan.job_settings?.sequence_length ?? plan.example_tokens?.limit ?? windlass.sequence_length ?? DEFAULT_LENGTH;
  const options = [["model", model], ["batch-size", batch], ["seq-len", length], ["hardware", machineName ?? "machine.yaml"]];
  for (const [name, value] of Object.entries(windlass)) {
    if (!["sequence_length", "clip_norm"].includes(name)) options.push([name.replaceAll("_", "-"), value]);
  }
  for (const name of ["num_examples", "num_validation_examples"]) {
    if (body[name]) options.push([name.replaceAll("_", "-"), body[name]]);
  }
  if (windlass.clip_norm != null) options.push(["clip-norm", windlass.clip_norm]);
  const words = options.map(([name, value]) => `--${name} ${quoted(String(value))}`);
  if (windlass.clip_norm === null) words.push("--no-clip");
  const command = `windlass plan ${words.join(" ")}`;
  if (machineName !== null) return command;
  return `cat > machine.yaml <<'END'\n${JSON.stringify(hardware, (_, value) => value ?? undefined, 2)}\nEND\n${command}`;
}
