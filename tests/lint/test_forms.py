"""Forms that mistakes have in longer scripts, and right code that differs from them by a little."""

from __future__ import annotations

from textwrap import dedent

import pytest

from ampcompare.lint.check import check_text
from ampcompare.lint.run import fix_text
from ampcompare.lint.selection import Selection
from ampcompare.mistakes.catalog import CODES


def codes_of(text: str) -> list[str]:
    found = [finding.code for finding in check_text("import torch\n" + dedent(text)) if CODES[finding.code].by_default]
    return [code for code in found if code != "AMP301"]


PAIRS = {
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
    "a checkpoint by a function of the script that does not get the scaler": (
        """
        def save(path, optimizer=None):
            state = {{"step": 1}}
            if optimizer is not None:
                optimizer_state = optimizer.state_dict()
                state["optimizer"] = optimizer_state
            {good}
            torch.save(state, path)
        def train(loss, scaler):
            scaler.scale(loss).backward()
        def main(optimizer, loss):
            scaler = torch.amp.GradScaler("cuda")
            train(loss, scaler=scaler)
            save("last", optimizer=optimizer)
        """,
        'state["scaler"] = scaler_state',
        "",
        ["AMP226"],
    ),
    "a checkpoint by another module that gets the scaler": (
        """
        def main(optimizer):
            scaler = torch.amp.GradScaler("cuda")
            {good}
            torch.save(optimizer.state_dict(), "optimizer.pt")
        """,
        "helpers.save_state(scaler=scaler)",
        "",
        ["AMP226"],
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
    "a checkpoint whose keys are assigned one by one": (
        """
        from apex import amp
        def train(self):
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer)
            state = {{"model": self.model.state_dict()}}
            state["optimizer"] = self.optimizer.state_dict()
            {good}
            torch.save(state, "last")
        """,
        'state["amp"] = amp.state_dict()',
        "",
        ["AMP119"],
    ),
    "a checkpoint by dict()": (
        """
        def save(optimizer, scaler):
            torch.save(dict(optimizer=optimizer.state_dict(), {good}), "last")
        def main(optimizer):
            scaler = torch.amp.GradScaler("cuda")
            save(optimizer, scaler)
        """,
        "scaler=scaler.state_dict()",
        "",
        ["AMP226"],
    ),
    "an opt level of a class": (
        """
        from apex import amp
        class Settings:
            opt_level = {good}{bad}
        """,
        '"O1"',
        '"01"',
        ["AMP108"],
    ),
    "an optimizer under the name of the options": (
        """
        from apex import amp
        class Model:
            def __init__(self, opt):
                self.opt = opt
                self.net, {good}{bad} = amp.initialize(self.net, self.optim)
            def train(self):
                self.optim.step()
        """,
        "self.optim",
        "self.opt",
        ["AMP109"],
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
    "an optimizer of the evaluation": (
        """
        from apex import amp
        def train(model, batches):
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            model, opt = amp.initialize(model, opt)
            {bad}
            for batch in batches:
                with amp.scale_loss(model(batch), opt) as scaled_loss:
                    scaled_loss.backward()
                opt.step()
            {good}
        """,
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)",
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)",
        ["AMP121"],
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
    "a model that is cast and bound again": (
        """
        {bad}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        "",
        "model = model.half()",
        ["AMP224"],
    ),
    "a model that is cast for another mode": (
        """
        if mode == "test":
            raise SystemExit
        elif mode == "inference":
            model = model.half()
            {good}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        "raise SystemExit",
        "",
        ["AMP224"],
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
    "one name for two kinds of DDP": (
        """
        if use_apex:
            from apex.parallel import DistributedDataParallel as DDP
        {good}
            {good_else}
        model = DDP(model, device_ids=[0])
        """,
        "else:",
        "",
        ["AMP116"],
    ),
    "autocast as a decorator": (
        """
        class Net(torch.nn.Module):
            @{good}{bad}
            def forward(self, x):
                return self.head(x)
        """,
        'torch.autocast("cuda")',
        "torch.autocast",
        ["AMP222"],
    ),
    "a device for autocast": (
        """
        device = torch.device("cuda")
        with torch.autocast({good}{bad}):
            loss = model(batch)
        """,
        "device.type",
        "device",
        ["AMP229"],
    ),
    "a functional cross entropy": (
        """
        with torch.autocast("{good}{bad}"):
            loss = torch.nn.functional.binary_cross_entropy(model(x), y)
        """,
        "cpu",
        "cuda",
        ["AMP230"],
    ),
    "a checkpoint that is loaded": (
        """
        def save(path):
            torch.save({{"opt": opt.state_dict(), "scaler": scaler.state_dict()}}, path)
        def load(path):
            state = torch.load(path)
            opt.load_state_dict(state["opt"])
            {good}
        """,
        'scaler.load_state_dict(state["scaler"])',
        "",
        ["AMP231"],
    ),
    "a checkpoint that is loaded in a loop": (
        """
        def save(path):
            torch.save({{"opt": opt.state_dict(), "scaler": scaler.state_dict()}}, path)
        def load(path, state):
            opt.load_state_dict(state["opt"])
            for name, part in {good}{bad}:
                part.train()
                {good_too}
        """,
        "parts.items()",
        "parts.items()",
        ["AMP231"],
    ),
    "a loss that a method returns": (
        """
        class Engine:
            def loss(self, batch):
                with torch.autocast("cuda", dtype=torch.{good}{bad}):
                    return self.model(batch)
            def train(self, batch):
                loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()
        """,
        "bfloat16",
        "float16",
        ["AMP232"],
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
    "a scaler that is off until the command line is read": (
        """
        scaler = torch.amp.GradScaler("cuda", enabled={good}{bad})
        def train(loss, optimizer):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        def main():
            global scaler
            scaler = torch.amp.GradScaler("cuda")
        if __name__ == "__main__":
            main()
        """,
        "True",
        "False",
        ["AMP409"],
    ),
}
PARTS = [(script, good, bad, codes) for script, good, bad, codes in PAIRS.values()]


@pytest.mark.parametrize(("script", "good", "bad", "codes"), PARTS, ids=PAIRS)
def test_a_mistake_and_its_correction(script: str, good: str, bad: str, codes: list[str]) -> None:
    """The mistake is found, and the same script without it has no finding."""
    other = "DDP = torch.nn.parallel.DistributedDataParallel"
    too = "part.load_state_dict(state[name])"

    wrong = codes_of(script.format(good="", bad=bad, good_too="", good_else=""))
    right = codes_of(script.format(good=good, bad="", good_too=too, good_else=other))

    assert wrong == codes
    assert right == []


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
