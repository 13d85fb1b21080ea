"""Replay golden scenarios through `ampcompare.apex.amp`; a script for a child process.

Usage: golden_replay.py OUTPUT STRICT-NAMES FILE... A file has one recording (`.json`) or a list (`.json.xz`). Each
scenario starts from a closed session. OUTPUT receives one JSON object: `arithmetic`, the digest of this machine's;
`replayed`, by the name of each scenario what its `initial`, `steps` and `final` became (or an error); and `by_hand`,
the same without ampcompare's engine, of the scenarios that `amp_by_hand` can train.
"""

import hashlib
import io
import json
import lzma
import math
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import golden_models as recipe
from amp_by_hand import AmpByHand, is_within_reach

from ampcompare.apex import DeprecatedFeatureWarning, amp

CODES = {torch.float16: "h", torch.bfloat16: "b", torch.float32: "f", torch.float64: "d", torch.int64: "l"}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def code(tensor: Any) -> str:
    return "-" if tensor is None else CODES[tensor.dtype]


def codes(tensors: Any) -> str:
    return "".join(code(t) for t in tensors)


def raw(tensor: torch.Tensor) -> bytes:
    # `to`, as O1 casts what `Tensor.cpu` moves.
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def sha(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(b"none" if tensor is None else raw(tensor))
    return digest.hexdigest()


def number(value: float) -> float | str:
    return value if value - value == 0 else ("nan" if value != value else "inf" if value > 0 else "-inf")


def summary(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().contiguous().flatten()
    return [sha([tensor]), [number(float(v)) for v in flat[:4]]]


class Replay:
    """One scenario, through `ampcompare.apex.amp` or another object with its surface, on any device."""

    def __init__(self, scenario: dict[str, Any], strict: bool, amp: Any = amp, device: str = "cpu") -> None:
        self.s = scenario
        self.strict = strict
        self.amp = amp
        self.device = device
        self.enabled = scenario["amp"].get("enabled", True)
        self.make()

    def make(self, saved: dict[str, Any] | None = None) -> None:
        s = self.s
        self.amp._amp_state.close()
        self.models = [recipe.build(spec).to(self.device) for spec in s["models"]]
        self.initial = [
            [i, name, list(p.shape), *summary(p)]
            for i, m in enumerate(self.models)
            for name, p in m.named_parameters()
        ]
        self.optimizers = [
            getattr(torch.optim, spec["type"])([self.group(g) for g in spec["groups"]], **spec["args"])
            for spec in s["optimizers"]
        ]
        order = s["restart"]["order"] if saved else None
        if order == "load_then_init":
            self.load(saved)
        options = {k: DTYPES.get(v, v) if k == "cast_model_outputs" else v for k, v in s["amp"].items()}
        one_model, one_optimizer = len(self.models) == 1, len(self.optimizers) == 1
        models, optimizers = self.amp.initialize(
            self.models[0] if one_model else self.models,
            self.optimizers[0] if one_optimizer else self.optimizers,
            verbosity=0,
            strict=self.strict,
            **options,
        )
        assert (models is self.models[0]) if one_model else (models is self.models)
        assert (optimizers is self.optimizers[0]) if one_optimizer else (optimizers is self.optimizers)
        if order == "init_then_load":
            self.load(saved)
        if saved:
            self.amp.load_state_dict(saved["amp"])
        elif "preload_scalers" in s:
            self.amp.load_state_dict(s["preload_scalers"])

    def load(self, saved: Any) -> None:
        for model, state in zip(self.models, saved["models"], strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        state = {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "amp": self.amp.state_dict(),
        }
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    def group(self, spec: dict[str, Any]) -> dict[str, Any]:
        params = [
            p
            for name, p in self.models[spec["model"]].named_parameters()
            if "only" not in spec or any(name.startswith(prefix) for prefix in spec["only"])
        ]
        return {"params": params, **{k: v for k, v in spec.items() if k not in ("model", "only")}}

    def batch(self, spec: dict[str, Any], stream: int) -> torch.Tensor:
        return recipe.make_input(spec, stream).to(self.device)

    def model_params(self) -> list[torch.nn.Parameter]:
        return [p for m in self.models for p in m.parameters()]

    def master_params(self) -> list[torch.Tensor]:
        return [p for o in self.optimizers for p in self.amp.master_params(o)]

    def run(self) -> dict[str, Any]:
        steps = []
        initial = self.initial
        for t in range(self.s["steps"]):
            steps.append(self.step(t))
            if self.s.get("restart", {}).get("after") == t + 1:
                self.make(self.save())
        final: dict[str, Any] = {
            "model_state_dict": [
                [k, code(v), sha([v])] for m in self.models for k, v in m.state_dict().items()
            ],
            "optimizer_state_dtypes": [
                "".join(f"{k}:{code(v)}," for k, v in sorted(state.items()) if isinstance(v, torch.Tensor))
                for o in self.optimizers
                for state in o.state_dict()["state"].values()
            ],
        }
        final["amp_state_dict"] = self.amp.state_dict() if self.enabled else None
        return {"initial": initial, "steps": steps, "final": final}

    def eval_outputs(self, t: int) -> str:
        outputs = []
        with torch.no_grad():
            for i, model in enumerate(self.models):
                model.eval()
                out = model(self.batch(self.s["models"][i]["input"], recipe.stream_of(self.s, t, 3, i, 0)))
                outputs += out if isinstance(out, tuple) else [out]
                model.train()
        return sha(outputs)

    def clear(self) -> None:
        how = self.s.get("zero_grad", "optimizer")
        if how == "none":
            for p in self.model_params():
                p.grad = None
        else:
            for owner in self.optimizers if how == "optimizer" else self.models:
                owner.zero_grad()

    def injected(self, kind: str, t: int, micro: int, loss: int) -> list[dict[str, Any]]:
        return [
            i
            for i in self.s.get("inject", [])
            if i["kind"] == kind and (i["step"], i.get("micro", 0), i.get("loss", 0)) == (t, micro, loss)
        ]

    def backward(self, t: int, micro: int, record: dict[str, Any]) -> None:
        s = self.s
        outputs = []
        for i, model in enumerate(self.models):
            out = model(self.batch(s["models"][i]["input"], recipe.stream_of(s, t, micro, i, 0)))
            outputs.append(out if isinstance(out, tuple) else (out,))
        record["out_dtypes"] = codes(o for out in outputs for o in out)
        micros = s.get("micro_batches", 1)
        for j, spec in enumerate(s["losses"]):
            loss: Any = None
            for term in spec["terms"]:
                m, o = term["model"], term.get("output", 0)
                target_spec = s["models"][m]["targets"][o]
                target = self.batch(target_spec, recipe.stream_of(s, t, micro, m, 1 + o))
                out = outputs[m][o]
                value = (
                    F.cross_entropy(out, target)
                    if target_spec["kind"] == "class"
                    else F.mse_loss(out, target)
                )
                loss = value if loss is None else loss + value
            record["loss"].append(number(loss.item()))
            record["loss_hex"].append(loss.item().hex())
            record["loss_dtypes"].add(code(loss))
            if micros > 1:
                loss = loss / micros
            for injection in self.injected("loss_mul", t, micro, j):
                loss = loss * float(injection["value"])
            chosen = [self.optimizers[k] for k in spec["optimizers"]]
            options: dict[str, Any] = {"loss_id": spec["loss_id"]} if "loss_id" in spec else {}
            if s.get("accumulate") == "delay" and micro < micros - 1:
                options["delay_unscale"] = True
            with self.amp.scale_loss(loss, chosen[0] if len(chosen) == 1 else chosen, **options) as scaled:
                scaled.backward(retain_graph=j < len(s["losses"]) - 1)
                for injection in self.injected("grad_inf", t, micro, j):
                    param = dict(self.models[injection["model"]].named_parameters())[injection["param"]]
                    param.grad.view(-1)[injection["index"]] = float(injection.get("value", "inf"))

    def step(self, t: int) -> dict[str, Any]:
        s = self.s
        record: dict[str, Any] = {
            "step": t,
            "loss": [],
            "loss_hex": [],
            "loss_dtypes": set(),
            "out_dtypes": "",
        }
        if t in s.get("eval_before", []):
            record["eval_out_sha"] = self.eval_outputs(t)
        if s.get("add_group", {}).get("step") == t:
            self.optimizers[s["add_group"]["optimizer"]].add_param_group(self.group(s["add_group"]["group"]))
        self.clear()
        for micro in range(s.get("micro_batches", 1)):
            self.backward(t, micro, record)
        if "clip" in s:
            record["clip_norm_hex"] = float(
                torch.nn.utils.clip_grad_norm_(self.master_params(), s["clip"])
            ).hex()
        params, masters = self.model_params(), self.master_params()
        record["loss_dtypes"] = "".join(sorted(record["loss_dtypes"]))
        record["param_dtypes"], record["grad_dtypes"] = codes(params), codes(p.grad for p in params)
        record["master_dtypes"], record["master_grad_dtypes"] = codes(masters), codes(p.grad for p in masters)
        grads_sha, master_grads_sha = sha(p.grad for p in params), sha(p.grad for p in masters)
        record["skipped"] = []
        for optimizer in self.optimizers:
            mine = list(self.amp.master_params(optimizer))
            before = sha(mine)
            optimizer.step()
            record["skipped"].append(sha(mine) == before)
        skipped = any(record["skipped"])
        record["grads_sha"], record["master_grads_sha"] = (
            (None, None) if skipped else (grads_sha, master_grads_sha)
        )
        scalers = self.amp.state_dict().values() if self.enabled else ()
        record["scalers"] = [[v["loss_scale"], v["unskipped"]] for v in scalers]
        record["params"] = [summary(p) for p in params]
        param_ids = {id(p) for p in params}
        masters = self.master_params()
        record["masters"] = (
            None if all(id(p) in param_ids for p in masters) else [summary(p) for p in masters]
        )
        buffers = [b for m in self.models for b in m.buffers()]
        record["buffers_sha"], record["buffer_dtypes"] = sha(buffers), codes(buffers)
        return record


def arithmetic() -> str:
    """Digest plain torch convolutions and matrix products, half and float, with their gradients.

    Equal digests mean that this machine rounds and sums as the one of the recording.
    """
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.float16):
        shapes = [(8, 32), (32, 32), (8, 3, 6, 6), (16, 3, 3, 3), (2, 5, 16)]
        tensors = [
            recipe.unit(math.prod(s), 7 + k).reshape(s).to(dtype).requires_grad_()
            for k, s in enumerate(shapes)
        ]
        x, w, image, kernel, sequence = tensors
        h = torch.tanh(F.linear(x, w))
        outputs = [
            h,
            F.linear(F.relu(F.linear(h, w)), w),
            F.conv2d(image, kernel, padding=1),
            F.conv2d(image, kernel, stride=2).mean(dim=(2, 3)),
            torch.matmul(sequence, sequence.transpose(1, 2)),
            F.gelu(F.layer_norm(sequence.float(), (16,))),
            F.batch_norm(image.float(), None, None, training=True),
            F.cross_entropy(h.float(), torch.arange(8)),
        ]
        sum(out.float().square().mean() for out in outputs).backward()
        for tensor in (*outputs, *(t.grad for t in tensors)):
            digest.update(raw(tensor))
    return digest.hexdigest()


def recordings(files: Iterable[str | Path]) -> Iterator[dict[str, Any]]:
    """Yield the recordings of each file."""
    for file in map(Path, files):
        if file.suffix == ".xz":
            yield from json.loads(lzma.decompress(file.read_bytes()))
        else:
            yield json.loads(file.read_text())


def compact(recording: dict[str, Any]) -> dict[str, Any]:
    """Return a recording with values other than losses folded into a digest for each step, and one for the end."""
    values = (
        "loss_hex",
        "eval_out_sha",
        "clip_norm_hex",
        "grads_sha",
        "master_grads_sha",
        "buffers_sha",
        "params",
    )
    steps = [_without(step, (*values, "masters")) for step in recording["steps"]]
    final = _without(recording["final"], ())
    final["model_state_dict"] = [entry[:2] for entry in final["model_state_dict"]]
    return {"steps": steps, "final": final}


def _without(record: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return {key: value for key, value in record.items() if key not in names} | {"digest": digest}


def main(output: str, strict_names: str, *files: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecatedFeatureWarning)
    strict = set(strict_names.split(","))
    results: dict[str, Any] = {"arithmetic": arithmetic(), "replayed": {}, "by_hand": {}}
    for recording in recordings(files):
        scenario = recording["scenario"]
        name = scenario["name"]
        results["replayed"][name] = run_scenario(scenario, name in strict, amp)
        if is_within_reach(scenario):
            results["by_hand"][name] = run_scenario(scenario, False, AmpByHand())
    Path(output).write_text(json.dumps(results))


def run_scenario(scenario: dict[str, Any], strict: bool, surface: Any) -> dict[str, Any]:
    """Return what a scenario became; or the error that ended it."""
    try:
        return Replay(scenario, strict, surface).run()
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        surface._amp_state.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
