"""What SGLang's own arguments tell about the KV that a server computes."""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from hicache_rig import absent, driver

from kvstore.connectors.sglang.model_identity import compute_dtype

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]


def test_the_computing_dtype_of_a_server(tmp_path: Path) -> None:
    """The scheduler's process gets the arguments as a pickle, with what SGLang resolved."""
    driver()
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.server_args import ServerArgs

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 512,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for argument, expected in (("auto", "bfloat16"), ("half", "float16"), ("float32", "float32")):
        arguments = ServerArgs(model_path=str(tmp_path), dtype=argument, device="cpu")
        model_config_of(arguments)
        assert compute_dtype(ForkingPickler.loads(ForkingPickler.dumps(arguments))) == expected
