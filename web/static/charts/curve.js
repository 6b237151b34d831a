// The loss of each step of one job.

export class Curve {
  #points = new Map(); // step: {attempt, train_loss, valid_loss}
  #ordinal; // of the last event that the points contain

  /** Makes a curve from the service's metrics, which contain all events up to their `last_event_ordinal`. */
  constructor(metrics) {
    const { step, attempt, train_loss, valid_loss } = metrics.data;
    step.forEach((number, index) => {
      this.#points.set(number, { attempt: attempt[index], train_loss: train_loss[index], valid_loss: valid_loss[index] });
    });
    this.#ordinal = metrics.last_event_ordinal;
  }

  /** Adds an event of the stream. An event that the points already contain changes nothing. */
  apply(event, ordinal) {
    if (event.type !== "metrics" || ordinal <= this.#ordinal) return false;
    this.#ordinal = ordinal;
    const { step, train_loss, valid_loss } = event.data;
    // An earlier attempt may have trained beyond its last commit. This attempt's numbers replace those steps. An event
    // with only an evaluation belongs to a step that is already trained.
    const first = train_loss === undefined ? step + 1 : step;
    for (const [number, point] of this.#points) {
      if (number >= first && point.attempt < event.attempt) this.#points.delete(number);
    }
    const point = this.#points.get(step) ?? { attempt: event.attempt, train_loss: null, valid_loss: null };
    this.#points.set(step, {
      attempt: event.attempt,
      train_loss: train_loss ?? point.train_loss,
      valid_loss: valid_loss ?? point.valid_loss,
    });
    return true;
  }

  /** The training loss of each step; null, shown as a gap, if it was not a number. */
  get train() {
    return this.#series("train_loss", () => true);
  }

  /** The validation loss of the steps where it was measured. */
  get valid() {
    return this.#series("valid_loss", (value) => value !== null);
  }

  #series(name, isWanted) {
    const points = [...this.#points].filter(([, point]) => isWanted(point[name])).sort(([a], [b]) => a - b);
    return { x: points.map(([step]) => step), y: points.map(([, point]) => point[name]) };
  }
}
