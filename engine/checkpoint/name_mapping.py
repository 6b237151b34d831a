"""Which tensors of a checkpoint make which parameters of a model, by the transformers library's own rules.

Checkpoints often use other names than today's modules, lack or carry the base model's prefix, or hold in several
tensors what is one parameter now (each expert of a mixture). The rules are the library's; this file applies them to
names, and to shapes on the meta device, before a byte is read.
"""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedGroup:
    """Checkpoint tensors that are converted together into one parameter or several."""

    target: str  # the first parameter they make
    converter: Any  # the library's WeightConverter; copied for each use, as it keeps what it is given
    sources: tuple[tuple[str, str], ...]  # (the converter's pattern that matched, checkpoint name), in order

    def convert(self, tensors: dict[str, Any], model: Any) -> dict[str, Any]:
        """Parameters by name, from checkpoint tensors by name; `tensors` is emptied."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, tensors.pop(name))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMatch:
    """How a checkpoint's names meet a model's."""

    direct: dict[str, list[str]]  # parameter: checkpoint names that are it as they stand; more than one is a fault
    groups: tuple[ConvertedGroup, ...]
    unused: tuple[str, ...]  # checkpoint names that no parameter takes, without those the library ignores


class NameRules:
    """The library's rules for one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._params = model.state_dict()  # names of parameters, tied ones under each of their names
        self._buffers = {name for name, _ in model.named_buffers()}
        mapping = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._converter_of = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]

    def match(self, names: Iterable[str]) -> NameMatch:
        """Matches a checkpoint's tensor names with the model's parameters."""
        direct: dict[str, list[str]] = {}
        grouped: dict[str, list[tuple[str, str]]] = {}
        unused = []
        # The converters take their sources (experts, say) in this order.
        for name in sorted(names, key=dot_natural_key):
            target, pattern = self._rename(name)
            if target not in self._params:
                if not self._is_ignored(name, target):
                    unused.append(name)
            elif pattern is None:
                direct.setdefault(target, []).append(name)
            else:
                grouped.setdefault(target, []).append((pattern, name))
        groups = tuple(
            ConvertedGroup(target=target, converter=self._converter_of[sources[0][0]], sources=tuple(sources))
            for target, sources in grouped.items()
        )
        return NameMatch(direct=direct, groups=groups, unused=tuple(unused))

    def loads_as_itself(self, name: str) -> bool:
        """Whether a checkpoint tensor of a parameter's own name becomes that parameter unchanged."""
        return self._rename(name) == (name, None)

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._params)
        if target not in self._params and name in self._params:
            target, pattern = rename_source_key(name, [], [], prefix, self._params)
        return target, pattern

    def _is_ignored(self, name: str, target: str) -> bool:
        """Buffers that older versions saved, and what the architecture says to skip."""
        if target in self._buffers or name.endswith((".rotary_emb.inv_freq", ".position_ids")):
            return True
        return any(pattern.search(name) or pattern.search(target) for pattern in self._ignored)
