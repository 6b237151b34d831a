// The form of the page that tries a job: its fields, the question that their values make, and the query of the address.

import { getMachine } from "../support/plans.js";
import { byId, make, setOptional } from "../support/dom.js";

const AUTO = "auto";

// Each field has the name that the address and the question use, and the `params` that an error may name. A field that
// has its default value is left out of both, except where `always` is true. An empty number means `empty`. The service
// tells the limits of numbers. A list that `hasNumbers` takes a number of the address, too.
const JOB = [
  { name: "model", label: "Model", kind: "select", params: ["model"], always: true, options: [],
    help: "A model of this service, or a published shape, of which no files are needed." },
  { name: "batch_size", label: "Batch size", kind: "int", initial: 16, always: true,
    params: ["batch_size", "windlass.batch_size"], help: "Examples of a step." },
  { name: "sequence_length", label: "Sequence length", kind: "int", initial: null,
    empty: "as the model", help: "Tokens of an example. Empty: 2048, or the most that the model takes." },
  { name: "num_microbatches", label: "Micro-batches", kind: "int", initial: null, empty: AUTO,
    help: "Parts in which a step is computed. Empty: as many as are fastest." },
  { name: "clip", label: "Clip gradients", kind: "select", initial: "on", options: ["on", "off"], params: [],
    help: "Clipping needs all gradients before the first update. Without it updates can begin during the backward pass." },
  { name: "clip_norm", label: "Clip norm", kind: "float", initial: 1,
    help: "The largest norm of all gradients. It does not change the time of a step." },
  { name: "precision", label: "Precision", kind: "select", initial: "bf16", options: ["bf16", "fp16", "fp32"],
    help: "The format in which the model computes." },
  { name: "state_precision", label: "State precision", kind: "select", initial: "fp32",
    options: ["fp32", "split", "bf16"],
    help: "The format of the optimizer's states. split: the same bits in less space. bf16: less space, less exact." },
  { name: "num_examples", label: "Training examples", kind: "int", initial: null, empty: "not known",
    params: ["num_examples"], help: "Of the training file, to tell the time of the whole job." },
  { name: "epochs", label: "Epochs", kind: "int", initial: 3, empty: "3",
    help: "Times that the job goes through its examples. They change the time of the job only." },
];
const MORE = [
  { name: "cut_matrices", label: "Cut matrices", kind: "select", hasNumbers: true, initial: AUTO, options: [AUTO, "off"],
    help: "auto: large matrices are computed in parts where that makes a plan possible or faster." },
  { name: "gpus", label: "GPUs of the job", kind: "int", initial: 1, empty: AUTO,
    help: "Of those that the machine has. Empty: as many as are fastest." },
  { name: "gradient_updates", label: "Gradient updates", kind: "select", initial: AUTO,
    options: [AUTO, "active", "kept"],
    help: "active: during the backward pass. kept: in the next forward pass. auto: the fastest order that is exact." },
  { name: "accumulation_precision", label: "Gradient sums", kind: "select", initial: "fp32",
    options: ["fp32", "bf16", "fp16"], help: "The format in which gradients are summed: fp32, or the model's." },
  { name: "lanes", label: "Lanes", kind: "int", initial: null, empty: AUTO,
    help: "Sums of micro-batches that are made separately. Empty: one." },
  { name: "num_validation_examples", label: "Validation examples", kind: "int", initial: 0,
    params: ["num_validation_examples"], help: "Of a validation file. Evaluations take device memory, too." },
];
// The initial values of these are those of the chosen machine; `size` is the part of a desktop's name.
const MACHINE = [
  { name: "machine", label: "Machine", kind: "select", params: ["hardware", "machine"], always: true, options: [],
    help: "This machine as windlass doctor measured it, an ordinary desktop, or a machine of a publication." },
  { name: "machine_gpus", label: "GPUs", kind: "int", part: ["gpus", "count"], size: "gpus", min: 0, max: 64,
    help: "All GPUs of the machine." },
  { name: "gpu_memory", label: "GPU memory (GiB)", kind: "float", part: ["gpus", "memory_gib"], min: 1, max: 1024,
    help: "Memory of each GPU." },
  { name: "ram", label: "RAM (GiB)", kind: "float", part: ["host", "memory_gib"], size: "ram", min: 1, max: 32768,
    help: "Host memory. Of a desktop, 4 GiB are the system's, and its rates follow from its size." },
  { name: "ssds", label: "SSDs", kind: "int", part: ["ssds", "count"], size: "ssds", min: 1, max: 64,
    help: "SSDs that hold model states." },
];
const FIELDS = [...JOB, ...MORE, ...MACHINE];
// Fields whose values are no settings of the object `windlass` as they stand.
const NO_SETTINGS = new Set(["model", "batch_size", "num_examples", "num_validation_examples", "clip", "clip_norm"]);

export class PlanForm {
  #values = {}; // name: the value, null where a number is left empty; a text that is no number stays a text
  #machines = new Map();
  #shapes = new Map();
  #limits = JSON.parse(byId("try-form").dataset.limits);
  #controls = new Map();

  /** `onChange` is called after each change by the user. */
  constructor(onChange) {
    this.onChange = onChange;
    for (const [id, fields] of [["try-job-fields", JOB], ["try-more-fields", MORE], ["try-machine-fields", MACHINE]]) {
      byId(id).append(...fields.map((field) => this.#makeField(field)));
    }
    byId("try-form").addEventListener("submit", (event) => event.preventDefault());
  }

  /** Sets the ids of models, the shapes and machines that there are, and the values of an address' query. */
  fill(models, shapes, machines, query) {
    this.#machines = new Map(machines.map((machine) => [machine.id, machine]));
    // A model that is here goes before a shape of the same name.
    this.#shapes = new Map(shapes.filter(({ id }) => !models.includes(id)).map((shape) => [shape.id, shape]));
    this.models = models;
    this.read(query);
  }

  /** Sets the values of an address' query. Others get their defaults. */
  read(query) {
    const given = new URLSearchParams(query);
    this.#values = {};
    const first = { model: this.#optionsOf({ name: "model" })[0], machine: [...this.#machines.keys()][0] };
    for (const field of FIELDS) {
      const text = given.get(field.name);
      this.#values[field.name] = text === null ? (first[field.name] ?? this.#initial(field)) : parse(field, text);
    }
    this.render();
  }

  /** The query that keeps these values. */
  get query() {
    const kept = FIELDS.filter((field) => field.always || !this.#isInitial(field));
    const pairs = kept.map(({ name }) => [name, this.#values[name] ?? ""]);
    return new URLSearchParams(pairs).toString();
  }

  /** Whether the service has the files of the model, so that a job can name it. */
  get isModelHere() {
    return this.models.includes(this.#values.model);
  }

  get machine() {
    return this.#machines.get(this.#values.machine);
  }

  /** A copy of the values, to be compared later. */
  get values() {
    return { ...this.#values };
  }

  /** Makes the request's body, and the same as arguments of `windlass plan`. */
  async question() {
    const values = this.#values;
    const windlass = {};
    for (const field of [...JOB, ...MORE]) {
      if (NO_SETTINGS.has(field.name) || this.#isInitial(field)) continue;
      const value = values[field.name] ?? (field.empty === AUTO ? AUTO : null);
      if (value !== null) windlass[field.name] = value;
    }
    if (values.clip === "off") windlass.clip_norm = null;
    else if (values.clip_norm != null && values.clip_norm !== 1) windlass.clip_norm = values.clip_norm; // empty: the default
    const body = { model: values.model, windlass };
    if (values.batch_size !== null) body.batch_size = values.batch_size;
    if (values.num_examples !== null) body.num_examples = values.num_examples;
    if (values.num_validation_examples !== 0) body.num_validation_examples = values.num_validation_examples;
    const { name, hardware } = await this.#chosenMachine();
    if (name !== "measured") body.hardware = hardware;
    return { body, machineName: name, hardware };
  }

  /** Shows an error at the field that it names. Returns false if no field is named. Null removes all errors. */
  showError(error) {
    const param = error?.param ?? null;
    const wrong = FIELDS.find((field) => param !== null && paramsOf(field).includes(param));
    for (const [name, { control, problem }] of this.#controls) {
      const isWrong = name === wrong?.name;
      setOptional(problem, isWrong ? plain(error.message, param) : null);
      if (isWrong) control.setAttribute("aria-invalid", "true");
      else control.removeAttribute("aria-invalid");
    }
    if (MORE.includes(wrong)) byId("try-more").open = true;
    return wrong !== undefined;
  }

  /** Describes how the values differ from earlier ones, such as "batch size 16 → 32". */
  changesFrom(before) {
    const changed = FIELDS.filter(({ name }) => !Object.is(before[name], this.#values[name]));
    // Another machine has other numbers of its own.
    const told = changed.some(({ name }) => name === "machine") ? changed.filter((field) => !field.part) : changed;
    const shown = (field, value) => (value === null ? (field.empty ?? "none") : value);
    const nameOf = ({ label }) => label.replace(/ \(.*/, "").replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase());
    return told.map((field) => `${nameOf(field)} ${shown(field, before[field.name])} → ${shown(field, this.#values[field.name])}`);
  }

  /** Returns the machine's name, null if its numbers were changed beyond what a name says, and its hardware. */
  async #chosenMachine() {
    const { machine } = this;
    if (!machine) return { name: this.#values.machine, hardware: (await getMachine(this.#values.machine)).hardware };
    let { id: name, hardware } = machine;
    const changed = MACHINE.filter((field) => field.part && !this.#isInitial(field));
    const sized = changed.filter((field) => machine.sizes && field.size);
    if (sized.length > 0) {
      name += `:${sized.map((field) => `${field.size}=${this.#values[field.name]}`).join(",")}`;
      ({ hardware } = await getMachine(name));
    }
    const own = changed.filter((field) => !sized.includes(field));
    if (own.length === 0) return { name, hardware };
    hardware = structuredClone(hardware);
    for (const { name: field, part: [kind, key] } of own) hardware[kind][key] = this.#values[field];
    return { name: null, hardware };
  }

  #initial(field) {
    if (!field.part) return field.initial ?? null;
    const { machine } = this;
    if (!machine) return null;
    if (machine.sizes && field.size) return machine.sizes[field.size][0];
    return round(machine.hardware[field.part[0]][field.part[1]]);
  }

  #isInitial(field) {
    return Object.is(this.#values[field.name], this.#initial(field));
  }

  #optionsOf(field) {
    if (field.name === "model") return [...this.models, ...this.#shapes.keys()];
    return field.name === "machine" ? [...this.#machines.keys()] : field.options;
  }

  /** Makes a field's elements. A desktop comes in a few sizes, which are chosen; other numbers are typed. */
  #makeField(field, sizes = null) {
    const box = make("div", "", "field");
    const label = make("label", field.label);
    const isList = field.kind === "select" || sizes !== null;
    const control = make(isList ? "select" : "input");
    const help = make("p", field.help, "help");
    const problem = make("p", "", "field-error");
    control.id = `try-${field.name}`;
    control.name = field.name;
    label.htmlFor = control.id;
    help.id = `${control.id}-help`;
    problem.id = `${control.id}-error`;
    problem.setAttribute("role", "alert");
    problem.hidden = true;
    control.setAttribute("aria-describedby", `${help.id} ${problem.id}`);
    if (!isList) {
      control.type = "number";
      control.inputMode = field.kind === "int" ? "numeric" : "decimal";
      const [min, max] = this.#limits[field.name] ?? [field.min, field.max];
      Object.assign(control, { min: min ?? "", max: max ?? "", step: field.kind === "int" ? 1 : "any" });
      control.placeholder = field.empty ?? "";
    }
    control.addEventListener("input", () => this.#change(field, control));
    box.append(label, control, help, problem);
    this.#controls.set(field.name, { box, control, problem, sizes });
    return box;
  }

  #change(field, control) {
    this.#values[field.name] = parse(field, control.value);
    if (field.name === "machine") {
      for (const each of MACHINE) if (each.part) this.#values[each.name] = this.#initial(each);
    }
    this.render();
    this.onChange();
  }

  /** Shows the values. A control in which the user types keeps its text. */
  render() {
    for (const field of FIELDS) {
      const sizes = (field.size && this.machine?.sizes?.[field.size]) ?? null;
      const { box, sizes: before } = this.#controls.get(field.name);
      if (String(sizes) !== String(before)) box.replaceWith(this.#makeField(field, sizes));
      const { control } = this.#controls.get(field.name);
      const value = this.#values[field.name];
      if (control.tagName === "SELECT") this.#setOptions(control, field, withUnknown(sizes ?? this.#optionsOf(field), value));
      const isTyped = control === document.activeElement && Object.is(parse(field, control.value), value);
      if (!isTyped) control.value = value ?? "";
    }
    this.#controls.get("clip_norm").control.disabled = this.#values.clip === "off";
    this.#controls.get("gpu_memory").box.hidden = this.#values.machine_gpus === 0; // there is none
    const isEdited = MACHINE.some((field) => field.part && !this.#isInitial(field));
    setOptional(byId("try-machine-about"), isEdited ? null : this.machine?.description);
  }

  #setOptions(control, field, options) {
    const key = JSON.stringify(options);
    if (control.dataset.key === key) return;
    control.dataset.key = key;
    const groups = new Map(); // by title; a list without groups has one without a title
    for (const option of options) {
      const title = this.#groupOf(field, option);
      if (!groups.has(title)) groups.set(title, []);
      groups.get(title).push(new Option(this.#titleOf(field, option), option));
    }
    control.replaceChildren(...[...groups].flatMap(([title, made]) => (title === "" ? made : group(title, made))));
  }

  #groupOf(field, option) {
    if (field.name !== "model") return "";
    return this.#shapes.has(option) ? "Published shapes" : this.models.includes(option) ? "Models of this service" : "";
  }

  #titleOf(field, option) {
    if (field.name === "model" && this.#shapes.has(option)) {
      return `${option} (${Number((this.#shapes.get(option).num_params / 1e9).toPrecision(3))} billion parameters)`;
    }
    if (field.name !== "machine") return String(option);
    if (option === "measured") return "this machine";
    const card = this.#machines.get(option)?.sizes ? "desktop" : "published";
    return this.#machines.has(option) ? `${option} (${card})` : option;
  }
}

const paramsOf = ({ name, params, part }) =>
  params ?? (part ? [`hardware.${part.join(".")}`] : [`windlass.${name}`]);

function group(title, options) {
  const made = make("optgroup");
  made.label = title;
  made.append(...options);
  return made;
}

/** The value that a control's or an address' text stands for. */
function parse({ kind, hasNumbers }, text) {
  if (kind === "select") return hasNumbers && /^\d+$/.test(text) ? Number(text) : text;
  if (text.trim() === "") return null;
  return Number.isNaN(Number(text)) ? text : Number(text);
}

/** A list of options, with the value of an address that is none of them: the service says what is wrong with it. */
const withUnknown = (options, value) =>
  value === null || options.some((option) => String(option) === String(value)) ? options : [...options, value];

/** An error's text without the field's name, which stands above it. */
const plain = (message, param) => (message.startsWith(`${param}: `) ? message.slice(param.length + 2) : message);

const round = (value) => Number(value.toPrecision(6));
