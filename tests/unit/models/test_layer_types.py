"""Types of layers, as every supported release of transformers gives them."""

from __future__ import annotations

import pytest
import transformers

from mopd_dataplane.models import layer_types


def test_one_set_of_arguments_for_all_layers_is_each_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers gives them up to 5.18: a layer that sees everything has no window there either."""
    names = ["full_attention", "sliding_attention", "linear_attention"]
    monkeypatch.setattr(
        layer_types, "get_layer_types_and_kwargs", lambda config: (names, {"sliding_window": 16, "number_of_states": 2})
    )
    types = layer_types.LayerTypes(transformers.LlamaConfig())
    assert types.windows == {"full_attention": 0, "sliding_attention": 16}
    assert types.states_of_layers == [2, 2, 2]
