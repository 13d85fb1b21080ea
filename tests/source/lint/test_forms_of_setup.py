"""Forms of mistakes with optimizers, models, autocast and checkpoints, and right code that differs by a little."""

from __future__ import annotations

import pytest

from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.run import Selection, fix_text
from tests.source.lint.forms import codes_of_pair

PAIRS = {
    "a scaler of each step that scales nothing": (
        """
        def train(model, optimizer, loader):
            for x, y in loader:
                optimizer.zero_grad()
                scaler = optimizer.grad_scaler if use_amp else torch.amp.GradScaler("cuda", enabled={good}{bad})
                with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
                    loss = model(x, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        "False",
        "True",
        ["AMP225"],
    ),
    "a second amp.initialize": (
        """
        from apex import amp
        def main(net_g, opt_g, net_d, opt_d):
            net_g = amp.initialize(net_g{bad}, opt_level="O1")
            net_d, opt_d = amp.initialize(net_d, opt_d, opt_level="O1")
            with amp.scale_loss(loss, opt_d) as scaled_loss:
                scaled_loss.backward()
        """,
        "",
        ", opt_g",
        ["AMP109", "AMP102"],
    ),
    "half and amp.initialize by two options": (
        """
        from apex import amp
        def main(model, optimizer):
            if args.fp16:
                model.half()
            if {good}{bad}:
                model, optimizer = amp.initialize(model, optimizer)
        """,
        "args.level is not None",
        "args.fp16",
        ["AMP112"],
    ),
    "a mask beyond fp16 in a method that autocast decorates": (
        """
        class Attention(torch.nn.Module):
            def __init__(self, head_dim):
                self.scale = head_dim ** -0.5
            @torch.autocast("cuda"{good})
            def forward(self, q, k, mask):
                scores = (q @ k.transpose(-2, -1)) * self.scale
                if mask is not None:
                    scores = scores.view(2, 3).masked_fill_(mask, float("-1e9"))
                return scores.softmax(-1)
        """,
        ", dtype=torch.bfloat16",
        "",
        ["AMP236"],
    ),
    "a mask beyond fp16 of a tensor that is half": (
        """
        def mask_out(scores, mask):
            fill = torch.zeros(3, dtype=torch.{good}float16).masked_fill(mask, -65505)
            return scores.half().masked_fill(mask, -1e4), fill
        """,
        "b",
        "",
        ["AMP236"],
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
    "a checkpoint by another module that gets the optimizer alone": (
        """
        from helpers import save_checkpoint, train
        def main(model, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            train(model, optimizer, scaler)
            save_checkpoint("last", model=model, optimizer=optimizer, {good})
        """,
        "scaler=scaler if ready else None",
        "",
        ["AMP226"],
    ),
    "a checkpoint by another module that may have kept the scaler": (
        """
        import helpers
        def main(model, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            {good}
            helpers.save_checkpoint("last", model=model, optimizer=optimizer)
        """,
        "helpers.Saver(scaler)",
        "",
        ["AMP226"],
    ),
    "images that another module saves, and settings of the optimizer": (
        """
        from helpers import save_images, save_model
        def main(model, optimizer, OPTIMIZATION):
            scaler = torch.amp.GradScaler("cuda")
            save_images(model, optimizer)
            save_model(model, OPTIMIZATION)
            save_model(model, torch.optim.swa_utils.AveragedModel(model))
            averaged = torch.optim.swa_utils.AveragedModel(model)
            save_model(averaged)
            {bad}
        """,
        "",
        "save_model(model, optimizer)",
        ["AMP226"],
    ),
    "a checkpoint of an optimizer that steps by itself": (
        """
        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")
            def train(self, loss):
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            def evaluate(self, loss):
                head_optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
                loss.backward()
                head_optimizer.step()
                torch.save({{"optimizer": {good}{bad}.state_dict()}}, "last")
        """,
        "head_optimizer",
        "self.optimizer",
        ["AMP226"],
    ),
    "a scaler for all epochs, or a new one for each": (
        """
        from helpers import save_checkpoint
        def main(model, optimizer):
            {bad}
            for epoch in range(10):
                {good}
                for batch in loader:
                    optimizer.zero_grad()
                    scaler.scale(model(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                save_checkpoint(epoch, model, optimizer)
        """,
        "scaler = torch.amp.GradScaler('cuda')",
        "scaler = torch.amp.GradScaler('cuda')",
        ["AMP226"],
    ),
    "a model that another function wraps for itself": (
        """
        from apex import amp
        def evaluate(model, batch):
            model = torch.nn.DataParallel(model)
            {good}
            {bad}
        def main(model, optimizer):
            model = evaluate(model, batch)
            model, optimizer = amp.initialize(model, optimizer)
        """,
        "return batch",
        "return model",
        ["AMP101"],
    ),
    "a checkpoint to which a method adds entries": (
        """
        def main(self, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            state = {{"optimizer": optimizer.state_dict()}}
            {good}
            state = self.model.extend(state)
            torch.save(state, "last")
        """,
        'state["scaler"] = scaler.state_dict()',
        "",
        ["AMP226"],
    ),
    "a checkpoint of an optimizer with underscores": (
        """
        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")
            def save(self):
                torch.save({{"optimizer": self.__optimizer__.state_dict(), {good}}}, "last")
        """,
        '"scaler": self.scaler.state_dict()',
        "",
        ["AMP226"],
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
    "a model that is cast where the scaler may be off": (
        """
        scaler = torch.amp.GradScaler("cuda"{good})
        if pure_fp16:
            model = model.half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        ", enabled=not pure_fp16",
        "",
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


@pytest.mark.parametrize(("script", "good", "bad", "codes"), PAIRS.values(), ids=PAIRS)
def test_a_mistake_and_its_correction(script: str, good: str, bad: str, codes: list[str]) -> None:
    """The mistake is found, and the same script without it has no finding."""
    wrong, right = codes_of_pair(script, good, bad)

    assert wrong == codes
    assert right == []


@pytest.mark.parametrize(("loads", "fixed"), [("", 1), ("optimizer.load_state_dict(state['optimizer'])", 0)])
def test_a_state_that_nothing_would_load_is_not_added(loads: str, fixed: int) -> None:
    """The state of the scaler is added to a checkpoint unless the module would load that of the optimizer alone."""
    text = f"""
import torch
scaler = torch.amp.GradScaler("cuda")
{loads}
torch.save({{"optimizer": optimizer.state_dict()}}, "last")
"""
    selection = Selection()

    assert fix_text(text, check_text(text, selection.reports), selection)[2] == fixed
