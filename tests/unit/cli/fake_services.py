"""A working directory in which `pdserve up` starts fake services that only report readiness."""

from __future__ import annotations

import json
from pathlib import Path

#: Modules that `pdserve up` runs.
SERVICES = {
    "router_svc": "router_svc/__main__.py",
    "prefill_svc": "worker_svc/prefill.py",
    "decode_svc": "worker_svc/decode.py",
}
FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


def with_fake_services(tmp_path: Path) -> Path:
    """Adds a model `tiny`, and fake services that `python -m` finds there before the real ones."""
    for path in SERVICES.values():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).with_name("__init__.py").touch()
    for service in SERVICES:
        set_steps(tmp_path, service, "notify=STATUS=loading the model", "until-sigterm")
    model = tmp_path / "tiny"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def set_steps(workdir: Path, service: str, *steps: str) -> None:
    """Sets the steps a fake service takes when started; see fake_service.py."""
    code = (
        f"import runpy, sys\nsys.argv[1:] = {list(steps)!r}\nrunpy.run_path({str(FAKE_SERVICE)!r}, run_name='__main__')"
    )
    path = workdir / SERVICES[service]
    path.with_suffix(".new").write_text(code)
    path.with_suffix(".new").replace(path)
