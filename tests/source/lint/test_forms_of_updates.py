"""Forms of mistakes between backward pass and step, and right code that differs by a little."""

from __future__ import annotations

from textwrap import dedent

import pytest

from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.run import Selection, fix_text
from tests.source.lint.forms import codes_of, codes_of_pair

PAIRS = {
    "clipping in the branch of accumulation": (
        """
        for i, batch in enumerate(loader):
            if steps > 1:
                scaler.scale(model(batch) / steps).backward()
                {bad}
                if (i + 1) % steps == 0:
                    {good}
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            else:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        "scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ["AMP201", "AMP211"],
    ),
    "clipping of fp16 copies in another method": (
        """
        from apex import amp
        class Runner:
            def prepare(self):
                self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="{good}{bad}")
            def backward(self, loss):
                with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
            def step(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
        """,
        "O1",
        "O2",
        ["AMP104"],
    ),
    "clipping by another function where the scaler steps": (
        """
        if self.use_amp:
            self.scaler.scale(loss).backward()
            {good}
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            if self.max_norm > 0:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)
            self.optimizer.step()
        """,
        "clip_gradients(self.net, self.optimizer)",
        "",
        ["AMP235"],
    ),
    "a pass in either branch, then clipping": (
        """
        if self.fp16:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        {good}
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        if self.fp16:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        """,
        "if self.fp16: self.scaler.unscale_(self.optimizer)",
        "",
        ["AMP201"],
    ),
    "clipping, then unscale_": (
        """
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            {good}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            {bad}
            scaler.step(optimizer)
            scaler.update()
        """,
        "scaler.unscale_(optimizer)",
        "scaler.unscale_(optimizer)",
        ["AMP201"],
    ),
    "a name for the last micro-batch": (
        """
        for i, batch in enumerate(loader):
            is_last = (i + 1) % 4 == 0
            scaler.scale(model(batch) / 4).backward()
            if is_last and ready:
                scaler.step(optimizer)
                {good}
                optimizer.zero_grad()
            {bad}
        """,
        "scaler.update()",
        "scaler.update()",
        ["AMP209"],
    ),
    "an accumulation under a name, not divided": (
        """
        from apex import amp
        for i, batch in enumerate(loader):
            waits = (i + 1) % accumulate != 0
            loss = criterion(model(batch))
            {good}
            with amp.scale_loss(loss, optimizer, delay_unscale=waits) as scaled_loss:
                scaled_loss.backward()
            if not waits:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "loss = loss / accumulate",
        "",
        ["AMP217"],
    ),
    "a norm by a function of the script": (
        """
        def norm_of(parameters):
            return sum(p.grad.detach().pow(2).sum() for p in parameters)

        def train(loader):
            for batch in loader:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                {bad}
                scaler.unscale_(optimizer)
                {good}
                scaler.step(optimizer)
                scaler.update()
        """,
        "norm = norm_of(model.parameters())",
        "norm = norm_of(model.parameters())",
        ["AMP218"],
    ),
    "gradients edited by a method": (
        """
        from apex import amp
        class Sparse:
            def fit(self, loss):
                self.net, self.opt = amp.initialize(self.net, self.opt, opt_level="{good}{bad}")
                with amp.scale_loss(loss, self.opt) as scaled_loss:
                    scaled_loss.backward()
                self.penalize()
                self.opt.step()
            def penalize(self):
                for m in self.net.modules():
                    m.weight.grad.data.add_(torch.sign(m.weight))
        """,
        "O1",
        "O2",
        ["AMP117"],
    ),
    "clipping with FP16_Optimizer": (
        """
        from apex.fp16_utils import FP16_Optimizer
        optimizer = FP16_Optimizer(optimizer)
        optimizer.backward(loss)
        {good}{bad}
        optimizer.step()
        """,
        "optimizer.clip_master_grads(1.0)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ["AMP104"],
    ),
    "a loss that is scaled in place": (
        """
        loss = model(batch)
        {bad}
        total += loss.item()
        """,
        "",
        "loss = scaler.scale(loss)",
        ["AMP228"],
    ),
    "a scaled loss under its name": (
        """
        from apex import amp
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        writer.add_scalar({good}{bad}, scaled_loss.item(), step)
        """,
        '"scaled_loss"',
        '"loss"',
        ["AMP118"],
    ),
    "the scale of a loss": (
        """
        from apex import amp
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        scale = scaled_loss.item() {good}{bad} loss.item()
        """,
        "//",
        "-",
        ["AMP118"],
    ),
    "a second step": (
        """
        def train(a, b):
            scaler.scale(a).backward()
            scaler.step(optimizer)
            {good}
            optimizer.zero_grad()
            scaler.scale(b).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        "scaler.update()",
        "",
        ["AMP204"],
    ),
    "gradients that are dropped where they are not finite": (
        """
        for batch in loader:
            scaler.scale(model(batch)).backward()
            {good}{bad}
                optimizer.zero_grad()
            scaler.step(optimizer)
            scaler.update()
        """,
        "if not torch.isfinite(loss):",
        "if first:",
        ["AMP214"],
    ),
}


@pytest.mark.parametrize(("script", "good", "bad", "codes"), PAIRS.values(), ids=PAIRS)
def test_a_mistake_and_its_correction(script: str, good: str, bad: str, codes: list[str]) -> None:
    """The mistake is found, and the same script without it has no finding."""
    wrong, right = codes_of_pair(script, good, bad)

    assert wrong == codes
    assert right == []


def test_scalers_of_other_classes_work_otherwise() -> None:
    """A class whose name ends in GradScaler may update itself in its step."""
    script = """
    from .amp import {name}
    scaler = {name}()
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(model(batch)).backward()
        scaler.step(optimizer)
    """

    assert codes_of(script.format(name="GradScaler")) == ["AMP204"]
    assert codes_of(script.format(name="StaticGradScaler")) == []


def test_packages_of_optimizers_are_no_optimizers() -> None:
    """`torch.optim.SGD(...)` is no call of a method of an optimizer, so the step after it is known."""
    script = """
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in loader:
            scaler.scale(net(batch)).backward()
            opt.step()
            scaler.update()
            opt.zero_grad()
    """
    assert codes_of(script) == ["AMP203"]


def test_two_networks_are_unscaled_once() -> None:
    """Where gradients are clipped twice, the fix of the first clipping is that of the second."""
    script = """
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(text.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """
    text = "import torch\n" + dedent(script)
    selection = Selection(select=("AMP2",))

    fixed, left, _ = fix_text(text, check_text(text, selection.reports), selection)

    assert codes_of(script) == ["AMP201", "AMP201"]
    assert fixed.count("scaler.unscale_(optimizer)") == 1
    assert left == check_text(fixed, selection.reports) == []


@pytest.mark.parametrize("line", ["global amp", "pass"])
def test_a_name_that_a_function_imports_for_the_module(line: str) -> None:
    """With `global` an import in one function counts in the others; without, it is a name of that function alone."""
    script = f"""
        def main():
            {line}
            from apex import amp

        def train():
            loss = model(batch)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.zero_grad()
            optimizer.step()
    """
    assert ("AMP214" in codes_of(script)) is (line == "global amp")


@pytest.mark.parametrize("base", ["Base", "Other"])
def test_methods_of_a_base_class_in_the_file_are_followed(base: str) -> None:
    """A clip in an inherited method comes between backward pass and step as one of the class itself does."""
    script = f"""
        class Base:
            def clip(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

        class Trainer({base}):
            def fit(self):
                for batch in loader:
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch)).backward()
                    self.clip()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """
    assert codes_of(script) == (["AMP201"] if base == "Base" else [])


@pytest.mark.parametrize("given", ["amp", "other"])
def test_amp_that_is_passed_to_a_function(given: str) -> None:
    """A parameter is what all calls in the file pass for it."""
    script = f"""
        from apex import amp

        def train(model, optimizer, mixed):
            for batch in loader:
                with mixed.scale_loss(model(batch), optimizer) as scaled:
                    scaled.backward()
                    optimizer.step()
                optimizer.zero_grad()

        train(model, optimizer, {given})
    """
    assert codes_of(script) == (["AMP105"] if given == "amp" else [])
