"""The decisions of a plan in words, for the terminal and the dashboard."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceWords:
    """A label that users read, and what the value means."""

    label: str
    meaning: str


def _words(label: str, meaning: str) -> ChoiceWords:
    return ChoiceWords(label=label, meaning=meaning)


# Of a job on a GPU, by the names of `report.choices_of`, without the lists for each block and layer. A block is the
# embedding, a layer or the head. Its states are its params and the optimizer's states.
CHOICES_IN_WORDS = {
    "gpus": _words("GPUs", "that the job computes on"),
    "num_microbatches": _words("micro-batches", "parts in which the batch of a step is computed"),
    "group_size": _words("micro-batches at once", "that go through each block together, with one copy of its params"),
    "gradient_updates": _words("updates", "active: during the backward pass; kept: in the next forward pass"),
    "states_on_gpu": _words("blocks on the GPU", "with params and optimizer states always there"),
    "states_on_host": _words("blocks in RAM", "with params and optimizer states there between their uses"),
    "states_on_ssd": _words("blocks on SSDs", "with params and optimizer states there between their uses"),
    "kept_grads_on_ssd": _words("gradients on SSDs", "blocks whose gradients wait there for their update"),
    "cached_params_gib": _words("params cached in RAM, GiB", "of blocks on SSDs, so that a pass does not read them"),
    "layers_in_pieces": _words(
        "layers in pieces", "whose params come to the GPU in pieces, to take less of its memory"
    ),
    "ends_in_pieces": _words("embedding and head in pieces", "whether their params come to the GPU in pieces"),
    "cut_matrices": _words("cut matrices", "most elements of a part in which a matrix is computed; no: in one part"),
    "grad_buffers_on_gpu": _words("gradient buffers", "blocks whose gradients may be on the GPU at the same time"),
    "grads_in_pieces": _words("gradients in pieces", "blocks whose gradients leave the GPU in pieces"),
    "commit_every": _words("steps for each commit", "after so many, states in memory are written to the SSDs"),
    "activations_on_host_gib": _words("activations in RAM, GiB", "swapped there from the GPU until the backward pass"),
    "activations_on_ssd_gib": _words("activations on SSDs, GiB", "swapped there from the GPU until the backward pass"),
}


def choices_in_words(*, is_cpu: bool) -> dict[str, ChoiceWords]:
    """Returns the words for each choice of a plan. `is_cpu`: the device is the CPU, so no text says GPU."""
    if not is_cpu:
        return CHOICES_IN_WORDS
    return {
        name: _words(*(of_devices(text, is_cpu=True) for text in (words.label, words.meaning)))
        for name, words in CHOICES_IN_WORDS.items()
    }


def of_devices(text: str, *, is_cpu: bool) -> str:
    """Returns a text about GPUs, or the same about devices where the device is the CPU."""
    return text.replace("GPUs", "devices").replace("GPU", "device") if is_cpu else text
