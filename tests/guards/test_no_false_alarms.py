"""Scripts without a mistake that look a little like one: documented recipes of torch.amp and Apex, and harder ones."""

import pytest

RECIPES = {
    "gradient penalty": """
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu"):
                loss = F.cross_entropy(model(x), y)
            grads = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            grads = [grad * inverse for grad in grads]
            with torch.autocast("cpu"):
                norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
                loss = loss + norm
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    "weights that are not numbers, called twice in a block": """
        for param in model.parameters():
            param.data.fill_(float("nan"))
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 1), y)
            loss.backward()
            optimizer.step()
        """,
    "a model that is called twice in a block, and swapped between blocks": """
        other = [torch.randn_like(param) for param in model.parameters()]
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 1), y)
            kept = [param.detach().clone() for param in model.parameters()]
            for param, value in zip(model.parameters(), other):
                param.data.copy_(value)
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                model(x)
            for param, value in zip(model.parameters(), kept):
                param.data.copy_(value)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    "two scalers, and a network without one": """
        nets = [nn.Linear(4, 3) for _ in range(3)]
        opts = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
        scalers = [torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")]
        for x, y in batches:
            for net, opt, one in zip(nets, opts, scalers):
                opt.zero_grad()
                one.scale(F.cross_entropy(net(x), y)).backward()
                one.unscale_(opt)
                clip_grad_norm_(net.parameters(), 1.0)
                one.step(opt)
                one.update()
            opts[2].zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            F.cross_entropy(nets[2](x), y).backward()
            clip_grad_norm_(nets[2].parameters(), 1.0)
            opts[2].step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "GAN with two optimizers, and one network trained more often": """
        netD, netG = nn.Linear(4, 1), nn.Linear(4, 4)
        optD, optG = torch.optim.Adam(netD.parameters()), torch.optim.Adam(netG.parameters())
        bce = nn.BCEWithLogitsLoss()
        for i, (x, y) in enumerate(batches * 2):
            netD.zero_grad()
            real = bce(netD(x), torch.ones(6, 1)) * (float("inf") if i == 1 else 1.0)
            scaler.scale(real).backward()
            fake = netG(torch.randn(6, 4))
            scaler.scale(bce(netD(fake.detach()), torch.zeros(6, 1))).backward()
            scaler.step(optD)
            scaler.update()
            if i % 2:
                netG.zero_grad()
                scaler.scale(bce(netD(fake), torch.ones(6, 1))).backward()
                scaler.step(optG)
                scaler.update()
        """,
    "closures": """
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for x, y in batches:
            def closure():
                lbfgs.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss
            lbfgs.step(closure)
        """,
    "checkpointed activations under autocast": """
        from torch.utils.checkpoint import checkpoint
        for x, y in batches:
            with torch.autocast("cpu"):
                loss = F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "gradients cleared by hand after a skip": """
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) * (float("inf") if i in (1, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            for parameter in model.parameters():
                if i == 1:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        """,
    "checkpoints": """
        import io
        plain = torch.amp.GradScaler("cpu", enabled=False)
        for x, y in batches[:2]:
            plain.scale(F.cross_entropy(model(x), y)).backward()
            plain.step(optimizer)
            plain.update()
            torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.save({"model": model.state_dict()}, io.BytesIO())
            torch.save({"training": {"optimizer": optimizer.state_dict(), "amp": scaler.state_dict()}}, io.BytesIO())
            torch.save(optimizer.state_dict(), io.BytesIO())
            torch.save(scaler.state_dict(), io.BytesIO())
        torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())
        """,
    "a limit that is scaled too": """
        for x, y in batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "fp16 by autocast, next to an Accelerator that has none": """
        import pytest
        pytest.importorskip("accelerate", reason="not installed: pip install accelerate")
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
}

LEGACY = {
    "typical, saved as documented": """
        import io
        for level in ("O0", "O1", "O2", "O3"):
            model, optimizer = initialize(level)
            parallel = nn.DataParallel(model)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            for i, (x, y) in enumerate(batches):
                loss = F.cross_entropy(parallel(x), y) * (float("inf") if i == 1 else 1.0)
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                state = {"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
                torch.save(state, io.BytesIO())
        """,
    "skipped steps that only the optimizer's zero_grad follows": """
        for level in ("O1", "O2"):
            model, optimizer = initialize(level)
            for i, (x, y) in enumerate(batches * 2):
                loss = F.cross_entropy(model(x), y) * (float("inf") if i % 4 else 1.0)
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        """,
    "a block without a backward pass, which keeps no gradients": """
        model, optimizer = initialize("O1")
        for number, (x, y) in enumerate(batches):
            penalty = model(x).float().square().mean()
            with amp.scale_loss(penalty, optimizer) as scaled:
                torch.autograd.grad(scaled, model.parameters())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (float("inf") if number == 1 else 1.0)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        """,
    "an FP16_Optimizer that skips": """
        from ampcompare.apex.fp16_utils import FP16_Optimizer, network_to_half
        model = network_to_half(build())
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.1), dynamic_loss_scale=True, verbose=False)
        for i, (x, y) in enumerate(batches * 2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y) * (float("inf") if i % 4 else 1.0)
            optimizer.backward(loss)
            optimizer.step()
        """,
    "accumulation with and without delay, and an export": """
        import io
        model, optimizer = initialize("O2")
        for delays in (True, False):
            for i, (x, y) in enumerate(batches):
                loss = F.cross_entropy(model(x), y) / 2 * (float("inf") if i < 2 else 1.0)
                with amp.scale_loss(loss, optimizer, delay_unscale=delays and i % 2 == 0) as scaled:
                    scaled.backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        torch.save(model.half().state_dict(), io.BytesIO())
        """,
    "averages that are read, swapped in and out, and clamps that change nothing": """
        import copy
        model, optimizer = initialize("O2")
        average = copy.deepcopy(model).float()
        for i, (x, y) in enumerate(batches * 2):
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            for mean, param in zip(average.parameters(), model.parameters()):
                mean.data.mul_(0.9).add_(param.data, alpha=0.1)
                param.data.clamp_(-100.0, 100.0)
            norms = [param.data.norm().item() for param in amp.master_params(optimizer)]
            with torch.no_grad():
                kept = [param.clone() for param in model.parameters()]
                for param, mean in zip(model.parameters(), average.parameters()):
                    param.copy_(mean)
                model(x)
                for param, old in zip(model.parameters(), kept):
                    param.copy_(old)
        """,
    "a checkpoint loaded behind initialize, weights set before the first step, and spectral norm": """
        last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = model.state_dict()
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        model.load_state_dict(state)
        for param in model.parameters():
            nn.init.normal_(param.data, std=0.1)
        for x, y in batches:
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "weights moved for a pass and moved back by rounding, and what has no master weights": """
        for level in ("O0", "O1", "O2", "O3"):
            model, optimizer = initialize(level)
            optimizer.zero_grad()
            moves = [0.05 * torch.randn_like(param) for param in model.parameters()]
            for x, y in batches:
                for direction in (1, -1):
                    with torch.no_grad():
                        for param, move in zip(model.parameters(), moves):
                            param.add_(direction * move)
                    if direction == 1:
                        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                            scaled.backward()
                if level != "O2":
                    for param in model.parameters():
                        param.data.clamp_(-0.1, 0.1)
                optimizer.step()
                optimizer.zero_grad()
        """,
    "GAN with one initialize, several loss scalers and a shared step": """
        netD, netG = nn.Linear(4, 1), nn.Linear(4, 4)
        optD, optG = torch.optim.Adam(netD.parameters()), torch.optim.Adam(netG.parameters())
        [netD, netG], [optD, optG] = amp.initialize(
            [netD, netG], [optD, optG], opt_level="O1", num_losses=3, verbosity=0)
        bce = nn.BCEWithLogitsLoss()
        for i, (x, y) in enumerate(batches):
            netD.zero_grad()
            real = bce(netD(x), torch.ones(6, 1)) * (float("inf") if i == 1 else 1.0)
            with amp.scale_loss(real, optD, loss_id=0) as scaled:
                scaled.backward()
            fake = netG(torch.randn(6, 4))
            with amp.scale_loss(bce(netD(fake.detach()), torch.zeros(6, 1)), optD, loss_id=1) as scaled:
                scaled.backward()
            optD.step()
            netG.zero_grad()
            with amp.scale_loss(bce(netD(fake), torch.ones(6, 1)), optG, loss_id=2) as scaled:
                scaled.backward()
            optG.step()
        """,
}
COMPILED = """
@torch.compile(backend="eager")
def step():
    optimizer.step()
for x, y in batches:
    F.cross_entropy(model(x), y).backward()
    step()
    optimizer.zero_grad()
"""
BUILD = """
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

def initialize(level):
    model = build()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
"""


@pytest.mark.parametrize("body", RECIPES.values(), ids=RECIPES)
def test_native_recipes_are_silent(body: str, script, guarded) -> None:
    """What PyTorch documents for torch.amp, and what people rightly do beyond it, gives no finding."""
    assert guarded(script(body)) == []


@pytest.mark.parametrize("body", LEGACY.values(), ids=LEGACY)
def test_apex_recipes_are_silent(body: str, script, guarded) -> None:
    """What Apex documents, at every level and through skipped steps, gives no finding."""
    assert guarded(script(body, apex=True, helper=BUILD)) == []


@pytest.mark.slow
def test_a_compiled_step_is_left_alone(script, guarded) -> None:
    """What torch.compile traces runs without the guards, and compiles."""
    assert guarded(script(COMPILED)) == []
