"""Forms of mistakes between backward pass and step, and right code that differs by a little."""

from textwrap import dedent

import pytest

from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes
from tests.source.lint.forms import codes_of, codes_of_pair

PAIRS = {
    "AMP203: a scheduler that got the optimizer": """
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], 0.3)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            optimizer.step()  # wrong
            scaler.step(optimizer)  # right
            scaler.update()  # right
            schedule.step()
    """,
    "AMP219: a threshold that decides a flag": """
        for batch in loader:
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            skip = bool(norm > 2.0 * limit)
            if not skip:
                scaler.step(optimizer)
                scaler.update()  # wrong
            scaler.update()  # right
            optimizer.zero_grad(set_to_none=True)
    """,
    "AMP219: an early return of a method that makes one step": """
        class Engine:
            def step(self, x):
                self.scaler.scale(self.model(x)).backward()
                self.scaler.unscale_(self.opt)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                if norm > 100:
                    self.scaler.update()  # right
                    self.opt.zero_grad()
                    return None
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()
    """,
    "AMP219: gradients that a function of the script looks at, and a training that ends": """
        def is_sane(model):
            return all(p.grad.abs().max() < 1e4 for p in model.parameters())
        for batch in loader:
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            if not is_sane(model):
                optimizer.zero_grad()
                continue  # wrong
                raise RuntimeError("diverged")  # right
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """,
    "AMP219: a method of the same object that clips, asked in the test": """
        class Engine:
            def is_small(self):
                return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0) < self.limit
            def step(self, x):
                self.scaler.scale(self.model(x)).backward()
                self.scaler.unscale_(self.opt)
                if not self.is_small():  # wrong
                if not self.trains():  # right
                    self.opt.zero_grad()
                    return
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()
    """,
    "AMP215: cleared in the branch without a scaler alone": """
        # TODO: zero_grad?
        for batch in loader:
            if not args.amp:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            else:
                optimizer.zero_grad()  # right
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP215: cleared in one of two methods that each make a step": """
        class Trainer:
            def step(self, x):
                if self.args.amp:
                    self.scaled(x)
                else:
                    self.plain(x)
            def scaled(self, x):
                self.optimizer.zero_grad()  # right
                self.scaler.scale(self.model(x)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            def plain(self, x):
                self.optimizer.zero_grad()
                self.model(x).backward()
                self.optimizer.step()
    """,
    "AMP215: only words of a comment and of a docstring": """
        def train(loader):
            '''Calls optimizer.zero_grad() in the hook.'''
            for batch in loader:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)  # then optimizer.zero_grad()
                scaler.update()
                for p in model.parameters(): p.grad = None  # right
    """,
    "AMP215: one of two optimizers": """
        for batch in loader:
            opt_a.zero_grad()
            opt_b.zero_grad()  # right
            scaler.scale(model(batch)).backward()
            scaler.step(opt_a)
            scaler.step(opt_b)
            scaler.update()
    """,
    "AMP215: branches that alternate, and a function with a training of its own": """
        def warm_up(loader):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
        for i, batch in enumerate(loader):
            if fresh:  # wrong
            if i % 4 == 0:  # right
                model.zero_grad()
            if not fresh:  # wrong
            if i % 4 != 0:  # right
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP125: a loss of both parts of a model names one optimizer": """
        opt_a = torch.optim.SGD(net.trunk.parameters(), lr=0.1)
        opt_b = torch.optim.SGD(net.head.parameters(), lr=0.1)
        net, [opt_a, opt_b] = amp.initialize(net, [opt_a, opt_b], num_losses=2)
        for batch in loader:
            opt_a.zero_grad(); opt_b.zero_grad()
            one, two = net(batch)
            with amp.scale_loss(one, opt_a, loss_id=0) as scaled_loss:  # wrong
            with amp.scale_loss(one, [opt_a, opt_b], loss_id=0) as scaled_loss:  # right
                scaled_loss.backward(retain_graph=True)
            with amp.scale_loss(two, [opt_a, opt_b], loss_id=1) as scaled_loss:
                scaled_loss.backward()
            opt_a.step()
            opt_b.step()
    """,
    "AMP125: a list under a name, which may hold every optimizer": """
        for batch in loader:
            opt_a.zero_grad(); opt_b.zero_grad()
            with amp.scale_loss(model(batch), opt_a) as scaled_loss:  # wrong
            with amp.scale_loss(model(batch), [opts[0], opts[1]]) as scaled_loss:  # right
                scaled_loss.backward()
            opt_a.step()
            opt_b.step()
    """,
    "AMP201: backward pass, clipping and step in three methods": """
        class Trainer:
            def __init__(self, model, optimizer):
                self.scaler = torch.amp.GradScaler("cuda")
                self.optimizer = optimizer
            def fit(self, loader):
                for batch in loader:
                    self.optimizer.zero_grad()
                    self.backward(batch)
                    self.clip()
                    self.update()
            def backward(self, batch):
                self.scaler.scale(self.model(batch)).backward()
            def clip(self):
                self.scaler.unscale_(self.optimizer)  # right
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            def update(self):
                self.scaler.step(self.optimizer)
                self.scaler.update()
    """,
    "AMP201 AMP211: clipping in the branch of accumulation": """
        for i, batch in enumerate(loader):
            if steps > 1:
                scaler.scale(model(batch) / steps).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # wrong
                if (i + 1) % steps == 0:
                    scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # right
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            else:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP104: clipping of fp16 copies in another method": """
        class Runner:
            def prepare(self):
                self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O2")  # wrong
                self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O1")  # right
            def backward(self, loss):
                with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
            def step(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
    """,
    "AMP201: a pass in either branch, then clipping": """
        if self.fp16:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        if self.fp16: self.scaler.unscale_(self.optimizer)  # right
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        if self.fp16:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
    """,
    "AMP217: an accumulation under a name, not divided": """
        for i, batch in enumerate(loader):
            waits = (i + 1) % accumulate != 0
            loss = criterion(model(batch))
            loss = loss / accumulate  # right
            with amp.scale_loss(loss, optimizer, delay_unscale=waits) as scaled_loss:
                scaled_loss.backward()
            if not waits:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "AMP218: a norm by a function of the script": """
        def norm_of(parameters):
            return sum(p.grad.detach().pow(2).sum() for p in parameters)
        def train(loader):
            for batch in loader:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)  # right
                norm = norm_of(model.parameters())
                scaler.unscale_(optimizer)  # wrong
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP218: limits in a hook of each weight": """
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.1, 0.1))  # wrong
            p.register_hook(lambda g: torch.clamp(g, min=0))  # right
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP218: limits in a hook of modules": """
        def limit(module, grad_input, grad_output):
            bound = 0.1  # wrong
            bound = 0.1 * scaler.get_scale()  # right
            return tuple(None if g is None else torch.clamp(g, -bound, bound) for g in grad_input)
        def train(model, loader):
            for layer in model.children():
                layer.register_full_backward_hook(limit)
            for batch in loader:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP218: limits in a hook by partial": """
        import functools
        def limit(bound, g):
            return g.clamp(-bound, bound)  # wrong
            return g.clamp(-g.std(), g.std())  # right
        for p in model.parameters():
            p.register_hook(functools.partial(limit, args.clip))
        for batch in loader:
            optimizer.zero_grad()
            with amp.scale_loss(model(batch), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    """,
    "AMP218: limits where a gradient was added": """
        class Trainer:
            def __init__(self, model):
                self.scaler = torch.amp.GradScaler()  # wrong
                self.scaler = torch.amp.GradScaler(enabled=False)  # right
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(self.limit)
            def limit(self, p):
                p.grad.data.clamp_(-self.bound, self.bound)
            def fit(self, loss):
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
    """,
    "AMP218: limits in the backward of a function": """
        class Sign(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sign()
            @staticmethod
            def backward(ctx, grad):
                return torch.nn.functional.hardtanh(grad)  # wrong
                return grad * (grad.abs() < 1)  # right
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP117: gradients edited by a method": """
        class Sparse:
            def fit(self, loss):
                self.net, self.opt = amp.initialize(self.net, self.opt, opt_level="O2")  # wrong
                self.net, self.opt = amp.initialize(self.net, self.opt, opt_level="O1")  # right
                with amp.scale_loss(loss, self.opt) as scaled_loss:
                    scaled_loss.backward()
                self.penalize()
                self.opt.step()
            def penalize(self):
                for m in self.net.modules():
                    m.weight.grad.data.add_(torch.sign(m.weight))
    """,
    "AMP118: a scaled loss under its name": """
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        writer.add_scalar("loss", scaled_loss.item(), step)  # wrong
        writer.add_scalar("scaled_loss", scaled_loss.item(), step)  # right
    """,
    "AMP204: a second step": """
        def train(a, b):
            scaler.scale(a).backward()
            scaler.step(optimizer)
            scaler.update()  # right
            optimizer.zero_grad()
            scaler.scale(b).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP214: gradients that are dropped where they are not finite": """
        for batch in loader:
            scaler.scale(model(batch)).backward()
            if first:  # wrong
            if not torch.isfinite(loss):  # right
                optimizer.zero_grad()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP204: a class whose name ends in GradScaler, which may update itself in its step": """
        from .amp import GradScaler as Scaler  # wrong
        from .amp import StaticGradScaler as Scaler  # right
        scaler = Scaler()
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
    """,
    "AMP201: methods of a base class in the file": """
        class Base:
            def clip(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        class Trainer(Base):  # wrong
        class Trainer(Other):  # right
            def fit(self):
                for batch in loader:
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch)).backward()
                    self.clip()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """,
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_mistake_and_its_correction(name: str) -> None:
    """The mistake is found, and the same script without it has no finding."""
    assert codes_of_pair(PAIRS[name]) == (name.partition(": ")[0].split(), [])


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
    selection = LintSelection(select=("AMP2",))

    fixed, left, _ = fixed_text_rest_and_num_fixes(text, check_text(text, selection.reports_code), selection)

    assert codes_of(script) == ["AMP201", "AMP201"]
    assert fixed.count("scaler.unscale_(optimizer)") == 1
    assert left == check_text(fixed, selection.reports_code) == []
