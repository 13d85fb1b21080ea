"""Each guard on one script that has its mistake and on the same script without it."""

import pytest

from ampcompare.base.errors import GuardError
from ampcompare.guards import GUARDS
from ampcompare.guards.checks.clipping import IN_APEX
from ampcompare.guards.detection import library_remedies
from ampcompare.guards.detection.library_remedies import (
    ACCELERATE,
    FABRIC,
    MANUAL_LIGHTNING,
    TRAINER_OF_LIGHTNING,
)
from ampcompare.training.precision.cpu_half import EmulatedHalf

NATIVE_MISTAKES = {
    "autocast-elsewhere": """
        for x, y in batches:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                context = torch.autocast("cuda")  # wrong
                context = torch.autocast("cuda", enabled=False)  # right
            with context:  # here
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "scaler-off": """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            off = torch.amp.GradScaler("cuda")  # wrong  # here
            off = torch.amp.GradScaler("cuda", enabled=False)  # right
        for x, y in batches:
            off.scale(F.cross_entropy(model(x), y)).backward()
            off.step(optimizer)
            off.update()
            optimizer.zero_grad()
        """,
    "accelerator-off": """
        import pytest
        pytest.importorskip("accelerate", reason="not installed: pip install accelerate")
        from accelerate import Accelerator

        precision = "fp16"  # wrong
        precision = "bf16"  # right
        accelerator = Accelerator(mixed_precision=precision, cpu=True)  # here
        model, optimizer = accelerator.prepare(model, optimizer)
        for x, y in batches:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        """,
    "step-unscaled": """
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)  # right
            scaler.update()  # right
            optimizer.step()  # wrong  # here
        """,
    "stale-cast": """
        other = [torch.randn_like(param) for param in model.parameters()]
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
                for param, value in zip(model.parameters(), other):
                    param.data.copy_(value)
                torch.clear_autocast_cache()  # right
                with torch.no_grad():
                    model(x)  # here
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "scaler-with-bf16": """
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):  # here
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()  # wrong
            loss.backward()  # right
            scaler.step(optimizer)  # wrong
            scaler.update()  # wrong
            optimizer.step()  # right
            optimizer.zero_grad()
        """,
    "autocast-without-dtype": """
        torch.set_autocast_dtype("cpu", torch.float16)  # as it is on a GPU
        for x, y in batches:
            with torch.autocast("cpu"):  # here
                loss = F.cross_entropy(model(x), y)
            loss.backward()  # wrong
            scaler.scale(loss).backward()  # right
            optimizer.step()  # wrong
            scaler.step(optimizer)  # right
            scaler.update()  # right
            optimizer.zero_grad()
        """,
    "step-twice": """
        for x, y in batches:
            with torch.autocast("cpu"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.step()  # wrong  # here
            optimizer.zero_grad()
        """,
    "step-twice (the other order)": """
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            optimizer.step()  # wrong
            scaler.step(optimizer)  # here
            scaler.update()
            optimizer.zero_grad()
        """,
    "clip-scaled": """
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)  # right
            clip_grad_norm_(model.parameters(), 1.0)  # here
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "clip-scaled (a function of the script)": """
        def limit_gradients(optimizer):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad.data.clamp_(-0.5, 0.5)  # here

        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)  # right
            limit_gradients(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "clip-scaled (new gradients)": """
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            limit = 0.5  # wrong
            limit = 0.5 * scaler.get_scale()  # right
            for param in model.parameters():
                seen = torch.clamp(param.detach(), -0.5, 0.5)
                param.grad = torch.clamp(param.grad, min=-limit, max=limit)  # here
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "clip-scaled (a hook)": """
        for parameter in model.parameters():
            parameter.register_hook(lambda g: torch.clamp(g, -0.5, 0.5))  # wrong  # here
            parameter.register_hook(lambda g: g + 0 * g.abs().clamp(max=1.0))  # right
        for x, y in batches:
            torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "clip-scaled (a hook of modules)": """
        def limit(module, grad_input, grad_output):
            bound = 0.5  # wrong
            bound = 0.5 * scaler.get_scale()  # right
            return tuple(None if g is None else g.clamp(-bound, bound) for g in grad_input)  # here

        model[2].register_full_backward_hook(limit)
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "clip-scaled (the backward of a function)": """
        class Limit(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return torch.clamp_max(grad, 0.5)  # wrong  # here
                return torch.clamp(grad, min=0)  # right

        for x, y in batches:
            scaler.scale(F.cross_entropy(Limit.apply(model(x)), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "backward-in-autocast": """
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
                loss.backward()  # wrong  # here
            loss.backward()  # right
            optimizer.step()
            optimizer.zero_grad()
        """,
    "amp-state-unsaved": """
        import io
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["scaler"] = scaler.state_dict()  # right
            torch.save(state, io.BytesIO())  # here
        """,
    "gradients-kept": """
        for number, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # here
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:  # wrong
                optimizer.zero_grad()  # wrong
            optimizer.zero_grad()  # right
        """,
}

APEX_MISTAKES = {
    "initialize-after-wrapping": """
        parallel = nn.DataParallel(model)  # wrong
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)  # here
        parallel = nn.DataParallel(model)  # right
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        """,
    "initialize-after-wrapping (a part)": """
        model = nn.Sequential(nn.DataParallel(model), nn.Linear(3, 3))  # wrong
        model = nn.Sequential(model, nn.Linear(3, 3))  # right
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # here
        """,
    "clip-scaled (inside the block)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
                clip_grad_norm_(amp.master_params(optimizer), 1.0)  # wrong  # here
            clip_grad_norm_(amp.master_params(optimizer), 1.0)  # right
            optimizer.step()
            optimizer.zero_grad()
        """,
    "clip-scaled (own, inside the block)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
                for param in amp.master_params(optimizer):  # wrong
                    torch.clamp_(param.grad, -0.5, 0.5)  # wrong  # here
            for param in amp.master_params(optimizer):  # right
                torch.clamp_(param.grad, -0.5, 0.5)  # right
            optimizer.step()
            optimizer.zero_grad()
        """,
    "clip-scaled (the half copies)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            clip_grad_norm_(model.parameters(), 1.0)  # wrong  # here
            clip_grad_norm_(amp.master_params(optimizer), 1.0)  # right
            optimizer.step()
            optimizer.zero_grad()
        """,
    "initialize-twice": """
        other = nn.Linear(4, 3)
        second = torch.optim.SGD(other.parameters(), 0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # wrong
        other, second = amp.initialize(other, second, opt_level="O1", verbosity=0)  # wrong  # here
        (model, other), (optimizer, second) = amp.initialize(  # right
            [model, other], [optimizer, second], opt_level="O1", verbosity=0)  # right
        for x, y in batches:
            for one, its in ((model, optimizer), (other, second)):
                with amp.scale_loss(F.cross_entropy(one(x), y), its) as scaled:
                    scaled.backward()
                its.step()
                its.zero_grad()
        """,
    "half-after-initialize": """
        import copy
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        model.half()  # wrong  # here
        copy.deepcopy(model).half()  # right
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x.half()).float(), y), optimizer) as scaled:  # wrong
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:  # right
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "amp-state-unsaved (Apex)": """
        import io
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save([{"optimizer": optimizer.state_dict()}], io.BytesIO())  # here
            torch.save(amp.state_dict(), io.BytesIO())  # right
        """,
    "weights-apart": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()  # here
            optimizer.zero_grad()
            for param in model.parameters():
                param.data.clamp_(-0.2, 0.2)
            for param in amp.master_params(optimizer):  # right
                param.data.clamp_(-0.2, 0.2)  # right
        """,
    "weights-apart (into a tensor that was kept from data)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        optimizer.zero_grad()
        kept = [param.data for param in model.parameters()]
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()  # here
            optimizer.zero_grad()
            torch._foreach_add_(kept, 0.1)  # wrong
        """,
    "weights-apart (decay by hand, before the step)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            with torch.no_grad():
                for param in model.parameters():  # wrong
                for param in amp.master_params(optimizer):  # right
                    param.mul_(0.999)
            optimizer.step()  # here
            optimizer.zero_grad()
        """,
    "weights-apart (set behind zero_grad, which makes the masters)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        optimizer.zero_grad()  # wrong
        for param in model.parameters():
            nn.init.normal_(param, std=0.1)
        optimizer.zero_grad()  # right
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()  # here
            optimizer.zero_grad()
        """,
    "weights-apart (a move for a pass that is taken back behind the step)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        optimizer.zero_grad()
        moves = [0.01 * torch.randn_like(param) for param in model.parameters()]
        for x, y in batches:
            torch._foreach_add_([param.data for param in model.parameters()], moves)
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            torch._foreach_sub_([param.data for param in model.parameters()], moves)  # right
            optimizer.step()  # here
            torch._foreach_sub_([param.data for param in model.parameters()], moves)  # wrong
            optimizer.zero_grad()
        """,
    "weights-apart (sharpness, in two steps)": """
        inner = optimizer
        class SAM(torch.optim.Optimizer):
            def __init__(self, base):
                super().__init__(base.param_groups, {})
                self.base, self.param_groups = base, base.param_groups
            @torch.no_grad()
            def first_step(self):
                for param in self.param_groups[0]["params"]:
                    self.state[param]["old"] = param.data.clone()
                    param.add_(param.grad, alpha=0.1)
            @torch.no_grad()
            def second_step(self):
                for param in self.param_groups[0]["params"]:
                    param.data = self.state[param]["old"]
                self.base.step()

        optimizer = SAM(inner)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        give = getattr(optimizer, "_master_params_to_model_params")
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.first_step()
            give()  # right
            optimizer.zero_grad()
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:  # here
                scaled.backward()
            optimizer.second_step()
            give()  # right
            optimizer.zero_grad()
            break  # wrong
        """,
    "gradients-kept (Apex)": """
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        scaler = amp._amp_state.loss_scalers[0]
        for number, (x, y) in enumerate(batches):
            before = scaler.loss_scale()
            loss = F.cross_entropy(model(x), y) * (float("inf") if number == 1 else 1.0)
            with amp.scale_loss(loss, optimizer) as scaled:  # here
                scaled.backward()
            optimizer.step()
            if scaler.loss_scale() >= before:  # wrong
                optimizer.zero_grad()  # wrong
            optimizer.zero_grad()  # right
        """,
}

ALL = {**NATIVE_MISTAKES, **APEX_MISTAKES}


def _guard(case: str) -> str:
    return case.partition(" (")[0]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("case", ALL)
def test_mistake_is_found_at_its_line(case: str, script, guarded, marked) -> None:
    """The script with the mistake gives one finding, of its guard, at the line that is at fault."""
    path = script(ALL[case], apex=case in APEX_MISTAKES, keep="wrong")
    assert guarded(path) == [f"{_guard(case)} {marked(path)}"]


@pytest.mark.parametrize("case", ALL)
def test_corrected_script_is_silent(case: str, script, guarded) -> None:
    """The same script without the mistake gives no finding, where all of its operations run in a dispatch mode."""
    with EmulatedHalf():
        assert guarded(script(ALL[case], apex=case in APEX_MISTAKES)) == []


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("step-twice", GUARDS["step-twice"].remedy),
        ("clip-scaled (inside the block)", IN_APEX),
    ],
)
def test_strict_guards_raise(case: str, remedy: str, script, guarded, marked) -> None:
    """Strict guards end the script by an error that names guard, line and remedy."""
    path = script(ALL[case], apex=case in APEX_MISTAKES, keep="wrong")
    with pytest.raises(GuardError) as caught:
        guarded(path, strict=True)
    assert str(caught.value).startswith(f"guard {_guard(case)}: train.py:{marked(path)}: ")
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("accelerate.accelerator", ACCELERATE["clip-scaled"]),
        ("lightning.fabric.fabric", FABRIC["clip-scaled"]),
        ("lightning.pytorch.plugins.precision.amp", TRAINER_OF_LIGHTNING["clip-scaled"]),
        ("lightning.pytorch.loops.optimization.manual", MANUAL_LIGHTNING["clip-scaled"]),
        ("train", GUARDS["clip-scaled"].remedy),
    ],
)
def test_where_a_library_scales_the_remedy_is_in_its_words(
    library: str, remedy: str, script, guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script holds no scaler that it could call."""
    monkeypatch.setattr(library_remedies, "is_installed_file", lambda file: file == "library.py")
    helper = f"""
names = {{"__name__": {library!r}}}
code = "def backward(scaler, loss): scaler.scale(loss).backward()"
exec(compile(code, "library.py", "exec"), names)
backward = names["backward"]
"""
    body = ALL["clip-scaled"].replace(
        "scaler.scale(F.cross_entropy(model(x), y)).backward()",
        "backward(scaler, F.cross_entropy(model(x), y))",
    )
    assert body != ALL["clip-scaled"]
    with pytest.raises(GuardError) as caught:
        guarded(script(body, helper=helper, keep="wrong"), strict=True)
    assert str(caught.value).endswith(remedy)


def test_every_guard_has_a_mistake() -> None:
    """No guard is left without a script, and each class belongs to an entry of the list."""
    from ampcompare.guards.checks import DETECTORS

    assert set(DETECTORS) == set(GUARDS)
    assert set(map(_guard, ALL)) == set(GUARDS) - {"initialize-before-cuda"}
