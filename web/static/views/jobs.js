// The page's data of all jobs: read from the service once, then updated by events.

export const TERMINAL = new Set(["succeeded", "failed", "cancelled"]);

export class Jobs {
  #order = []; // ids, newest first
  #jobs = new Map();
  hasOlder = false;

  /** Replaces all jobs by the list's first page. */
  replace(page) {
    this.#order = [];
    this.#jobs.clear();
    this.append(page);
  }

  /** Adds an older page. */
  append(page) {
    for (const job of page.data) {
      if (!this.#order.includes(job.id)) this.#order.push(job.id);
      this.put(job);
    }
    this.hasOlder = page.has_more;
  }

  /** Stores a job as the service sent it. */
  put(job) {
    const known = this.#jobs.get(job.id);
    // Only the stream updates known metrics, because answers may arrive out of order with it.
    const metrics = known ? known.metrics : job.windlass.last_metrics;
    // Until an attempt's first step is reported, the service's estimate of the finish is used.
    const told = known?.job.windlass.attempt === job.windlass.attempt ? known.finish : null;
    const finish = told ?? { at: job.estimated_finish, isEstimate: job.windlass.finish_is_estimate };
    // Events with only an evaluation lack these.
    const timeline = known?.timeline ?? metrics?.timeline ?? null;
    const measured = known?.measured ?? metrics?.measured ?? null;
    this.#jobs.set(job.id, { job, metrics, timeline, measured, finish, message: known?.message ?? null });
  }

  remove(id) {
    this.#order = this.#order.filter((other) => other !== id);
    this.#jobs.delete(id);
  }

  get(id) {
    return this.#jobs.get(id);
  }

  /** The ids of all known jobs, newest first. */
  ids() {
    return [...this.#order];
  }

  /** All known jobs, newest first. */
  list() {
    return this.#order.map((id) => this.#jobs.get(id)).filter(Boolean);
  }

  /** Applies an event. Returns true if the job must be read again, because other fields than its metrics changed. */
  apply(event) {
    const known = this.#jobs.get(event.job_id);
    if (!known) {
      if (event.data.status === "validating_files" && !this.#order.includes(event.job_id)) {
        this.#order.unshift(event.job_id);
      }
      return true;
    }
    if (event.type !== "metrics") {
      known.message = event.message;
      return true;
    }
    const { data } = event;
    const sameStep = known.metrics?.step === data.step;
    known.metrics = sameStep ? { ...known.metrics, ...data } : data;
    known.timeline = data.timeline ?? known.timeline;
    known.measured = data.measured ?? known.measured;
    if (data.remaining_s !== undefined) {
      const at = data.remaining_s === null ? null : event.created_at + data.remaining_s;
      known.finish = { at, isEstimate: data.remaining_is_estimate ?? true };
    }
    if (data.ssd_bytes_written_step_by_ssd == null) return false;
    // The forecast of SSD wear comes with the job. It converges, so reading it at steps 1, 2, 4, 8, … is enough.
    return known.job.windlass.ssd_wear === null || Number.isInteger(Math.log2(data.step));
  }
}

/** Returns the known jobs that the list's first page should contain but does not. */
export function missingFrom(page, known) {
  const there = new Set(page.data.map((job) => job.id));
  const end = page.has_more ? known.indexOf(page.data.at(-1).id) : -1; // later ones are on other pages
  return known.slice(0, end === -1 ? known.length : end).filter((id) => !there.has(id));
}

/** A job's display name: its suffix, else its model without the organization. */
/** The box of a job, or all that have a part of it. */
export const boxesOf = (job) => job.windlass.boxes?.join(", ") ?? job.windlass.box;

export const nameOf = (job) => job.suffix || job.model.split("/").at(-1);

/** The number of steps done and of all steps. The second is null until the files have been read. */
export function progressOf({ job, metrics }) {
  return { step: metrics?.step ?? job.windlass.step, total: metrics?.total_steps ?? job.windlass.total_steps };
}

/** Describes why a job does not train now; null for a job that trains or is finished. */
export function reasonOf({ job, metrics, message }) {
  if (TERMINAL.has(job.status)) return null;
  if (job.windlass.cancel_requested) return "Cancelling: it ends after its step";
  if (job.windlass.waiting_reason) return `Waiting: ${job.windlass.waiting_reason}`;
  switch (job.status) {
    case "validating_files":
      return job.windlass.preparation?.summary ?? "Checking the model and reading the files";
    case "queued":
      return "Waiting for its turn";
    case "running":
      return metrics ? null : (message ?? "Starting");
    case "pausing":
      return "Pausing: it ends its attempt after its step";
    case "paused":
      return "Paused: it holds no GPU and no memory";
    default:
      return null;
  }
}
