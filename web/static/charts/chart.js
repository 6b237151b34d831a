// Draws a curve with Plotly, which is loaded when the first job is shown.

const REDRAW_INTERVAL_MS = 400;
const MARKERS_UP_TO = 40;

let plotly = null;

function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/vendor/plotly.min.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      plotly = null;
      script.remove();
      reject(new Error("the charting library could not be loaded"));
    };
    document.head.append(script);
  });
  return plotly;
}

export class Chart {
  #element;
  #drawn = null;
  #wanted = null; // what is drawn next
  #timer = null;

  constructor(element) {
    this.#element = element;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#drawn && this.draw(this.#drawn));
  }

  /** Draws `{key, train, valid}`: a new key at once, else the last of several calls soon. A zoom is kept per key. */
  draw(curves) {
    this.#wanted = curves;
    if (curves.key !== this.#drawn?.key) this.#run();
    else this.#timer ??= setTimeout(() => this.#run(), REDRAW_INTERVAL_MS);
  }

  async #run() {
    clearTimeout(this.#timer);
    this.#timer = null;
    try {
      const Plotly = await loadPlotly();
      if (!this.#drawn) this.#element.replaceChildren();
      this.#drawn = this.#wanted;
      await Plotly.react(this.#element, this.#traces(), this.#layout(), this.#config());
    } catch (error) {
      if (!this.#drawn) this.#element.textContent = error.message;
    }
  }

  #color(name) {
    return getComputedStyle(this.#element).getPropertyValue(name).trim();
  }

  #traces() {
    const line = (name, { x, y }, color, markersUpTo) => ({
      name,
      x,
      y,
      type: "scatter",
      mode: x.length <= markersUpTo ? "lines+markers" : "lines",
      line: { color, width: 2 },
      marker: { color, size: 6 },
      hovertemplate: "%{y:.4f}",
    });
    const { train, valid } = this.#drawn;
    const traces = [line("training", train, this.#color("--train"), MARKERS_UP_TO)];
    if (valid.x.length) traces.push(line("validation", valid, this.#color("--valid"), 4 * MARKERS_UP_TO));
    return traces;
  }

  #layout() {
    const [ink, muted, grid, panel] = ["--ink", "--muted", "--line", "--panel"].map((name) => this.#color(name));
    const axisFont = { color: muted, size: 12 };
    const axis = { gridcolor: grid, linecolor: grid, tickfont: axisFont, zeroline: false, automargin: true };
    const spike = { spikecolor: muted, spikethickness: 1, spikedash: "dot" };
    const title = { title: { text: "step", font: axisFont }, unifiedhovertitle: { text: "step %{x}" } };
    const steps = { ...title, ...spike, hoverformat: ",d", tickformat: ",d" };
    if (this.#drawn.train.x.length <= 10) steps.dtick = 1; // no ticks between steps
    return {
      autosize: true,
      uirevision: this.#drawn.key,
      margin: { l: 8, r: 8, t: 8, b: 8 },
      paper_bgcolor: panel,
      plot_bgcolor: panel,
      font: { family: "system-ui, sans-serif", size: 13, color: ink },
      showlegend: false, // the page has a legend beside the title
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
      hovermode: "x unified",
      hoverlabel: { bgcolor: panel, bordercolor: grid, font: { color: ink } },
      // A finger that scrolls the page must not zoom.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, ...steps },
      yaxis: { ...axis, title: { text: "loss", font: axisFont } },
    };
  }

  #config() {
    return {
      responsive: true,
      displaylogo: false,
      // No data may leave this machine.
      showSendToCloud: false,
      plotlyServerURL: "",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    };
  }
}
