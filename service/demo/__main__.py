"""`make demo`: a complete run of windlass, from nothing to a fine-tuned model. `python -m windlass.service.demo`"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.service.cli import CommandError, follow_job
from windlass.service.demo.data import write_demo_files
from windlass.service.installation import (
    RequestRefusedError,
    ServiceClient,
    Settings,
    find_serving,
    load_settings,
    open_client,
)
from windlass.service.validation import model_dir

_MODEL = "demo-20m"
_NUM_TRAIN, _NUM_VALIDATION = 448, 64
_JOB = {
    "epochs": 1,
    "batch_size": 16,
    "num_microbatches": 1,
    "learning_rate": 1e-3,
    "warmup_steps": 8,
    "schedule": "cosine",
    "sequence_length": 96,
}
# GiB. The budgets are so small that most of the model's states rest on the SSDs, as they do for a large model.
_DEVICE_MEMORY_GIB = 0.25
_HOST_MEMORY_GIB, _HOST_MEMORY_GIB_BY_OPTIMIZER = 0.2, 0.08
_QUESTION = "What does the function json.dumps do?"


def main() -> None:
    """Makes data and a model, starts the service, trains over REST, and shows the result."""
    parser = argparse.ArgumentParser(description="Train a small model through the whole of windlass.")
    parser.add_argument("--home", type=Path, default=Path(".demo"), help="where everything goes")
    parser.add_argument("--num-train", type=int, default=_NUM_TRAIN, help="training examples")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the bars of saving and loading a small model
    settings = load_settings(options.home)
    try:
        _run(settings, options.num_train)
    except (CommandError, RuntimeError) as error:
        sys.exit(f"the demo stopped: {error}")


def _run(settings: Settings, num_train: int) -> None:
    train, validation = settings.home / "demo-train.jsonl", settings.home / "demo-validation.jsonl"
    settings.make_dirs()
    _say("1/5", "Questions and answers from the documentation of Python's standard library")
    write_demo_files(train, validation, num_train=num_train, num_validation=_NUM_VALIDATION)
    base = settings.models_dir / _MODEL
    _make_model(base, train)
    _say("3/5", "Starting the service: its own Ray, SQLite, two SSD servers")
    url = _start_service(settings)
    print(f"      dashboard: {url}")
    budgets = _budgets(settings)
    _say(
        "4/5",
        f"Training every parameter in {budgets['gpu_memory_gib']:.3g} GiB of device memory and "
        f"{budgets['host_memory_gib']:.3g} GiB of host memory",
    )
    with open_client(settings) as client:
        training_file, validation_file = (client.upload(path)["id"] for path in (train, validation))
        job = client.create_job(
            {
                "model": _MODEL,
                "training_file": training_file,
                "validation_file": validation_file,
                "suffix": "demo",
                "windlass": _JOB | {"budgets": budgets},
            }
        )
        _show_plan(client, job["id"])
        job = follow_job(client, job["id"])
    if job["status"] != "succeeded":
        reason = job["error"]["message"] if job["error"] else "see its events"
        raise CommandError(f"job {job['id']} is {job['status']}: {reason}")
    _show(settings, base, job["fine_tuned_model"], validation, url)


def _budgets(settings: Settings) -> dict[str, float]:
    """Returns the job's budgets. Each CPU optimizer needs buffers of its own in host memory."""
    by_optimizers = settings.num_cpu_optimizers * _HOST_MEMORY_GIB_BY_OPTIMIZER
    return {"gpu_memory_gib": _DEVICE_MEMORY_GIB, "host_memory_gib": _HOST_MEMORY_GIB + by_optimizers}


def _make_model(base: Path, train: Path) -> None:
    from windlass.service.demo.model import make_demo_model

    if (base / "model.safetensors").exists():
        _say("2/5", f"The base model is there already: {base}")
        return
    _say("2/5", "A byte-level BPE tokenizer and a model with random weights")
    num_params = make_demo_model(base, train)
    print(f"      {num_params / 1e6:.1f} M parameters in {base}")


def _start_service(settings: Settings) -> str:
    serving = find_serving(settings.home)
    if serving is None:
        command = [str(Path(sys.executable).with_name("windlass")), "up", "--detach", "--home", str(settings.home)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:  # the machine is measured at the first start
                print(f"      {line}", end="", flush=True)
        serving = find_serving(settings.home)
    if serving is None:
        raise CommandError(f"the service did not start; see {settings.home / 'logs'}")
    return serving.url


def _show_plan(client: ServiceClient, job_id: str) -> None:
    """Prints the plan that was made before the job was queued."""
    while client.job(job_id)["status"] == "validating_files":
        time.sleep(0.5)
    try:
        plan = client.plan(job_id)
    except RequestRefusedError as error:
        print(f"      not planned: {error}")
        return
    if not plan["feasible"]:
        return  # the job's error says so
    peaks = ", ".join(f"{name} {gib:.2f} GiB" for name, gib in plan["peak_gib"].items())
    print(f"      planned: {plan['step_s']:.3g} s a step, {plan['tokens_per_s']:.0f} tokens a second; peaks: {peaks}")
    print(f"      {states_in_words(plan['choices'])}")
    print(f"      {plan['reasons'][0]}", flush=True)


def states_in_words(choices: Mapping[str, Any]) -> str:
    """Tells where a plan keeps the states of the model's blocks, from the plan's choices."""
    places = {"states_on_ssd": "on the SSDs", "states_on_host": "in host memory", "states_on_gpu": "on the device"}
    rest = ", ".join(f"{choices[key]} blocks {place}" for key, place in places.items() if choices[key])
    moved = "; actors move those on the SSDs just in time" if choices["states_on_ssd"] else ""
    return f"model states: {rest}{moved}"


def _show(settings: Settings, base: Path, name: str, validation: Path, url: str) -> None:
    from windlass.service.demo.model import answer, measure_loss

    tuned = model_dir(name, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    _say("5/5", "The exported model, loaded by transformers")
    before, after = measure_loss(base, validation), measure_loss(tuned, validation)
    print(f"      loss on {_NUM_VALIDATION} unseen questions: {before:.3f} before, {after:.3f} after")
    print(f"      {_QUESTION}\n      > {answer(tuned, _QUESTION)}")
    print("      (so few steps from random weights teach frequent words only; --num-train 20000 trains for longer)\n")
    print(f"model      {tuned}")
    print(f"dashboard  {url}")
    print(f"stop       .venv/bin/windlass down --home {settings.home}")


def _say(step: str, what: str) -> None:
    print(f"[{step}] {what}", flush=True)


if __name__ == "__main__":
    main()
