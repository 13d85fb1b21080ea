"""Forms of mistakes with optimizers, models, autocast and checkpoints, and right code that differs by a little."""

import pytest

from tests.source.lint.forms import codes_of_pair

PAIRS = {
    "AMP236: a constant of the module, by `where`": """
        NEGATIVE = -(10**9)
        def attend(q, k, mask):
            with torch.autocast("cuda"):
                scores = torch.matmul(q, k)
                NEGATIVE_ROW = torch.full_like(scores, NEGATIVE)  # wrong
                NEGATIVE_ROW = torch.full_like(scores.float(), NEGATIVE)  # right
                return torch.where(mask, scores, NEGATIVE_ROW)
    """,
    "AMP119: added by keys to an empty dict, with a merge, and saved by a function of another file": """
        from project import save_checkpoint
        def train(model, loader):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
            state = {}
            state["model"] = model.state_dict()
            state |= {"optimizer": optimizer.state_dict()}
            state |= {"amp": amp.state_dict()}  # right
            save_checkpoint("folder", state)
    """,
    "AMP236: the least number of fp32": """
        LEAST = torch.finfo(torch.float32).min
        def attend(scores, mask):
            scores = scores.half()
            scores.masked_fill_(mask, LEAST)  # wrong
            scores.float().masked_fill_(mask, LEAST)  # right
    """,
    "AMP236: a new tensor": """
        mask = torch.full((4, 4), -1e9, dtype=torch.float16)  # wrong
        mask = torch.full((4, 4), -1e9).half()  # right
    """,
    "AMP119: added by `update`, and saved by a method of the model": """
        def train(args, model, loader, state):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
            state.update({"epoch": 1, "optimizer": optimizer.state_dict()})
            state.update(amp=amp.state_dict())  # right
            model.save(state)
    """,
    "AMP119: packed by a function": """
        def pack(model, optimizer):
            return {
                "model": model.state_dict(),
                "amp": amp.state_dict(),  # right
                "optimizer": optimizer.state_dict(),
            }
        model, optimizer = amp.initialize(model, optimizer)
        torch.save(pack(model, optimizer), "last.pt")
    """,
    "AMP226: the second argument, and a word of a comment": """
        scaler = torch.amp.GradScaler("cuda")
        state = dict(optimizer=optimizer.state_dict())  # scaler.state_dict() is not needed
        state["scaler"] = scaler.state_dict()  # right
        files.save_state("last.pt", state)
    """,
    "AMP237: a loop in a function that is called in autocast": """
        def fit(model, optimizer, loader):
            for batch in loader:
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()  # noqa: AMP221
                optimizer.step()
        with torch.autocast("cuda", dtype=torch.bfloat16):  # wrong
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):  # right
            fit(model, optimizer, loader)
    """,
    "AMP237: a decorated training, with a scaler": """
        @torch.autocast("cuda")  # wrong
        @torch.autocast("cuda", enabled=False)  # right
        def fit(model, loader):
            for batch in loader:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()  # noqa: AMP221
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP221: a decorated step": """
        from torch.amp import autocast
        @autocast("cuda", dtype=torch.bfloat16)  # wrong
        @autocast("cuda", dtype=torch.bfloat16, enabled=False)  # right
        def train_step(x, y):
            loss = model(x, y)
            loss.backward()
            with autocast("cuda", enabled=False):
                penalty(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        for x, y in loader:
            train_step(x, y)
    """,
    "AMP239: loaded by a library in bf16": """
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)  # wrong
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # right
        groups = [{"params": [p for n, p in model.named_parameters() if "bias" not in n]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-5)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "AMP239: in the type of its checkpoint": """
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")  # wrong
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").float()  # right
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "AMP239: compiled": """
        model = torch.compile(Net().to(torch.bfloat16), mode="reduce-overhead")  # wrong
        model = torch.compile(Net().to(torch.float32), mode="reduce-overhead")  # right
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "AMP239: by the Trainer of Lightning": """
        import lightning.pytorch as pl
        class Module(pl.LightningModule):
            def __init__(self, net):
                self.old = torch.optim.SGD(net.parameters())
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-5)
        trainer = pl.Trainer(precision="bf16-true")  # wrong
        trainer = pl.Trainer(precision="bf16-mixed")  # right
    """,
    "AMP224: loaded in fp16": """
        model = Net.from_pretrained(name, dtype="float16").cuda()  # wrong
        model = Net.from_pretrained(name, dtype="float32").cuda()  # right
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP224: an average or a teacher that no optimizer has": """
        ema = copy.deepcopy(model).half()  # right
        model = model.half()  # wrong
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.lerp_(weight, 0.1)
    """,
    "AMP224: a model inside of the one that is trained": """
        body = Net().half()  # wrong
        body = Net()  # right
        print(sum(param.numel() for param in body.parameters()))
        model = nn.Sequential(body, nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP311: options of a command line": """
        import subprocess
        level = ["--fp16", "--fp16_opt_level", "O2"]  # wrong
        level = ["--fp16"]  # right
        subprocess.run(["python", "train.py", *level])
    """,
    "AMP123: weights by way of a function that sorts them": """
        from apex.parallel import convert_syncbn_model
        def split(model):
            norms, rest = [], []
            for module in model.modules():
                rest.extend(module.parameters())
            return norms, rest
        model = convert_syncbn_model(model)  # right
        norms, rest = split(model)
        optimizer = torch.optim.SGD([{"params": rest}, {"params": norms, "weight_decay": 0.0}], lr=0.1)
        model = convert_syncbn_model(model)  # wrong
        model(batch).backward()
    """,
    "AMP123: a list of parameters that a class grows": """
        import apex
        class Trainer:
            def __init__(self, net):
                self.net = net
                params = []
                for name, value in self.net.named_parameters():
                    params.append({"params": [value]})
                self.optimizer = torch.optim.Adam(params)
                self.net = apex.parallel.convert_syncbn_model(self.net)  # wrong
                self.net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.net)  # right
                self.net.backward(self.optimizer)
    """,
    "AMP122: a model that amp.initialize returns is loaded too": """
        from apex import amp as mixed
        model, optimizer = mixed.initialize(model, optimizer)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["opt"])
        mixed.load_state_dict(state["scale"])  # right
        torch.save({"opt": optimizer.state_dict(), "scale": mixed.state_dict()}, path)
    """,
    "AMP124: a resume before amp.initialize, by a function": """
        def resume(path):
            amp.load_state_dict(torch.load(path)["amp"])
        def main(args, model, optimizer):
            if args.resume: resume(args.resume)  # wrong
            model, optimizer = amp.initialize(model, optimizer)
            if args.resume: resume(args.resume)  # right
    """,
    "AMP238: one method loads, another one makes the scaler and trains": """
        class Trainer:
            def resume(self, path):
                self.scaler.load_state_dict(torch.load(path)["scaler"])
            def fit(self, loader):
                self.scaler = torch.amp.GradScaler("cuda")  # wrong
                if self.scaler is None: self.scaler = torch.amp.GradScaler("cuda")  # right
                for batch in loader:
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """,
    "AMP225: a method that makes the scaler anew": """
        class Trainer:
            def begin(self):
                self.scaler = torch.amp.GradScaler("cuda")
            def fit(self, batches):
                for number, batch in enumerate(batches):
                    self.begin()  # wrong
                    if number == 20: self.begin()  # right
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """,
    "AMP225: a scaler of each step that scales nothing": """
        def train(model, optimizer, loader):
            for x, y in loader:
                optimizer.zero_grad()
                scaler = optimizer.grad_scaler if use_amp else torch.amp.GradScaler("cuda", enabled=True)  # wrong
                scaler = optimizer.grad_scaler if use_amp else torch.amp.GradScaler("cuda", enabled=False)  # right
                with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
                    loss = model(x, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "AMP109 AMP102: a second amp.initialize": """
        def main(net_g, opt_g, net_d, opt_d):
            net_g = amp.initialize(net_g, opt_g, opt_level="O1")  # wrong
            net_g = amp.initialize(net_g, opt_level="O1")  # right
            net_d, opt_d = amp.initialize(net_d, opt_d, opt_level="O1")
            with amp.scale_loss(loss, opt_d) as scaled_loss:
                scaled_loss.backward()
    """,
    "AMP112: half and amp.initialize by two options": """
        def main(model, optimizer):
            if args.fp16:
                model.half()
            if args.fp16:  # wrong
            if args.level is not None:  # right
                model, optimizer = amp.initialize(model, optimizer)
    """,
    "AMP236: a mask beyond fp16 of a tensor that is half": """
        def mask_out(scores, mask):
            fill = torch.zeros(3, dtype=torch.float16).masked_fill(mask, -65505)  # wrong
            fill = torch.zeros(3, dtype=torch.bfloat16).masked_fill(mask, -65505)  # right
            return scores.half().masked_fill(mask, -1e4), fill
    """,
    "AMP226: a checkpoint by a function of the script that does not get the scaler": """
        def save(path, optimizer=None):
            state = {"step": 1}
            if optimizer is not None:
                optimizer_state = optimizer.state_dict()
                state["optimizer"] = optimizer_state
            state["scaler"] = scaler_state  # right
            torch.save(state, path)
        def train(loss, scaler):
            scaler.scale(loss).backward()
        def main(optimizer, loss):
            scaler = torch.amp.GradScaler("cuda")
            train(loss, scaler=scaler)
            save("last", optimizer=optimizer)
    """,
    "AMP226: a checkpoint by another module that gets the optimizer alone": """
        from helpers import save_checkpoint, train
        def main(model, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            train(model, optimizer, scaler)
            save_checkpoint("last", model=model, optimizer=optimizer, )  # wrong
            save_checkpoint("last", model=model, optimizer=optimizer, scaler=scaler if ready else None)  # right
    """,
    "AMP226: a checkpoint by another module that may have kept the scaler": """
        import helpers
        def main(model, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            helpers.Saver(scaler)  # right
            helpers.save_checkpoint("last", model=model, optimizer=optimizer)
    """,
    "AMP226: images that another module saves, and settings of the optimizer": """
        from helpers import save_images, save_model
        def main(model, optimizer, OPTIMIZATION):
            scaler = torch.amp.GradScaler("cuda")
            save_images(model, optimizer)
            save_model(model, OPTIMIZATION)
            save_model(model, torch.optim.swa_utils.AveragedModel(model))
            averaged = torch.optim.swa_utils.AveragedModel(model)
            save_model(averaged)
            save_model(model, optimizer)  # wrong
    """,
    "AMP226: a checkpoint of an optimizer that steps by itself": """
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
                torch.save({"optimizer": self.optimizer.state_dict()}, "last")  # wrong
                torch.save({"optimizer": head_optimizer.state_dict()}, "last")  # right
    """,
    "AMP226: a scaler for all epochs, or a new one for each": """
        from helpers import save_checkpoint
        def main(model, optimizer):
            scaler = torch.amp.GradScaler('cuda')  # wrong
            for epoch in range(10):
                scaler = torch.amp.GradScaler('cuda')  # right
                for batch in loader:
                    optimizer.zero_grad()
                    scaler.scale(model(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                save_checkpoint(epoch, model, optimizer)
    """,
    "AMP101: a model that another function wraps for itself": """
        def evaluate(model, batch):
            model = torch.nn.DataParallel(model)
            return model  # wrong
            return batch  # right
        def main(model, optimizer):
            model = evaluate(model, batch)
            model, optimizer = amp.initialize(model, optimizer)
    """,
    "AMP226: a checkpoint to which a method adds entries": """
        def main(self, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            state = {"optimizer": optimizer.state_dict()}
            state["scaler"] = scaler.state_dict()  # right
            state = self.model.extend(state)
            torch.save(state, "last")
    """,
    "AMP108: an opt level of a class": """
        from apex import amp
        class Settings:
            opt_level = "01"  # wrong
            opt_level = "O1"  # right
    """,
    "AMP109: an optimizer under the name of the options": """
        class Model:
            def __init__(self, opt):
                self.opt = opt
                self.net, self.opt = amp.initialize(self.net, self.optim)  # wrong
                self.net, self.optim = amp.initialize(self.net, self.optim)  # right
            def train(self):
                self.optim.step()
    """,
    "AMP121: an optimizer of the evaluation": """
        def train(model, batches):
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            model, opt = amp.initialize(model, opt)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)  # wrong
            for batch in batches:
                with amp.scale_loss(model(batch), opt) as scaled_loss:
                    scaled_loss.backward()
                opt.step()
                opt.zero_grad()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)  # right
    """,
    "AMP224: a model that is cast where the scaler may be off": """
        scaler = torch.amp.GradScaler("cuda")  # wrong
        scaler = torch.amp.GradScaler("cuda", enabled=not pure_fp16)  # right
        if pure_fp16:
            model = model.half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "AMP116: one name for two kinds of DDP": """
        if use_apex:
            from apex.parallel import DistributedDataParallel as DDP
        else:  # right
            DDP = torch.nn.parallel.DistributedDataParallel  # right
        model = DDP(model, device_ids=[0])
    """,
    "AMP222: autocast as a decorator": """
        class Net(torch.nn.Module):
            @torch.autocast  # wrong
            @torch.autocast("cuda")  # right
            def forward(self, x):
                return self.head(x)
    """,
    "AMP229: a device for autocast": """
        device = torch.device("cuda")
        with torch.autocast(device):  # wrong
        with torch.autocast(device.type):  # right
            loss = model(batch)
    """,
    "AMP230: a functional cross entropy": """
        with torch.autocast("cuda"):  # wrong
        with torch.autocast("cpu"):  # right
            loss = torch.nn.functional.binary_cross_entropy(model(x), y)
    """,
    "AMP231: a checkpoint that is loaded in a loop": """
        def save(path):
            torch.save({"opt": opt.state_dict(), "scaler": scaler.state_dict()}, path)
        def load(path, state):
            opt.load_state_dict(state["opt"])
            for name, part in parts.items():
                part.train()
                part.load_state_dict(state[name])  # right
    """,
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_mistake_and_its_correction(name: str) -> None:
    """The mistake is found, and the same script without it has no finding."""
    assert codes_of_pair(PAIRS[name]) == (name.partition(": ")[0].split(), [])
