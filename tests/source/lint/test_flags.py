"""Branches on the flag that guards the wrap: clipping the gradients of the model itself is right in fp32."""

from textwrap import dedent

import pytest

from tests.source.lint.forms import codes_of, codes_of_pair

O2 = """
from apex import amp
from torch.nn.utils import clip_grad_norm_
def train(args, model, optimizer, loss, fp16=False):
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
{clip}
    optimizer.step()
"""
BRANCHES = {
    "else": """
        if {flag}:
            clip_grad_norm_(amp.master_params(optimizer), 1.0)
        else:
            clip_grad_norm_(model.parameters(), 1.0)
    """,
    "negation": """
        if not {flag}:
            clip_grad_norm_(model.parameters(), 1.0)
    """,
    "early return": """
        if {flag}:
            optimizer.step()
            return
        clip_grad_norm_(model.parameters(), 1.0)
    """,
    "joint condition": """
        if {flag} and args.clip:
            clip_grad_norm_(amp.master_params(optimizer), args.clip)
        elif args.clip:
            clip_grad_norm_(model.parameters(), args.clip)
    """,
    "conditional argument": """
        clip_grad_norm_(amp.master_params(optimizer) if {flag} else model.parameters(), 1.0)
    """,
    "conditional expression": """
        optimizer.clip_master_grads(1.0) if {flag} else clip_grad_norm_(model.parameters(), 1.0)
    """,
    "short circuit": """
        {flag} or clip_grad_norm_(model.parameters(), 1.0)
    """,
    "alias": """
        half = {flag}
        if half:
            optimizer.clip_master_grads(1.0)
        else:
            clip_grad_norm_(model.parameters(), 1.0)
    """,
}


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in dedent(text).strip().splitlines())


@pytest.mark.parametrize("branch", BRANCHES.values(), ids=BRANCHES)
def test_the_branch_without_fp16(branch: str) -> None:
    """Nothing is reported where the flag of the wrap is off; where the branches are swapped it is."""
    right = O2.format(clip=indented(branch.format(flag="args.fp16")))
    wrong = O2.format(clip=indented(branch.format(flag="(not args.fp16)")))

    assert "AMP104" not in codes_of(right)
    assert "AMP104" in codes_of(wrong)


@pytest.mark.parametrize(
    "clip",
    [
        "    clip_grad_norm_(model.parameters(), 1.0)",
        "    args.clip and clip_grad_norm_(model.parameters(), 1.0)",
    ],
)
def test_another_flag_hides_nothing(clip: str) -> None:
    """A condition that has nothing to do with the wrap does not make the clipping right."""
    assert "AMP104" in codes_of(O2.format(clip=clip))


FLAGS = {
    "AMP104: `enabled=` of initialize, which guards as an `if` does": """
        from torch.nn.utils import clip_grad_norm_
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", enabled=use_amp)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if use_amp:  # wrong
        if not use_amp:  # right
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    """,
    "AMP104: a flag that a class keeps, of another name in each method": """
        from torch.nn.utils import clip_grad_norm_
        class Trainer:
            def __init__(self, args, model, optimizer):
                self.args, self.use_fp16 = args, args.fp16
                self.model, self.optimizer = model, optimizer
                if args.fp16:
                    self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O2")
            def backward(self, loss):
                if self.args.fp16:
                    with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                        scaled_loss.backward()
                else:
                    loss.backward()
            def step(self):
                if self.use_fp16:  # wrong
                if not self.use_fp16:  # right
                    clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
    """,
    "AMP104: a flag that a function gets, compared as that of the caller": """
        from torch.nn.utils import clip_grad_norm_
        def clip(model, optimizer, half):
            if half:
                clip_grad_norm_(amp.master_params(optimizer), 1.0)
                return
            clip_grad_norm_(model.parameters(), 1.0)
        def train(args, model, optimizer, loss):
            if args.fp16:
                model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            clip(model, optimizer, args.clip)  # wrong
            clip(model, optimizer, args.fp16)  # right
    """,
    "AMP117: gradients that are changed by hand": """
        def train(args, model, optimizer, loss):
            if args.fp16:
                model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            if args.fp16:  # wrong
            if not args.fp16:  # right
                for parameter in model.parameters():
                    parameter.grad = parameter.grad * 0.5
            optimizer.step()
    """,
}


@pytest.mark.parametrize("name", FLAGS)
def test_other_forms_of_the_flag(name: str) -> None:
    """What is right in fp32 is reported where the flag of the wrap is on, and not where it is off."""
    wrong, right = codes_of_pair(FLAGS[name])
    assert [name[:6] in codes for codes in (wrong, right)] == [True, False]


HELD = """
import itertools
import torch
from apex import amp
from torch.nn.utils import clip_grad_norm_


def trainable(net):
    return [p for p in net.parameters() if p.requires_grad]


def clip(params):
    clip_grad_norm_(params, 1.0)


class Trainer:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        {held}
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O2")

    def step(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        {clip}
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("held", "clip", "is_found"),
    [
        ("pass", "params = list(self.model.parameters())\n        clip_grad_norm_(params, 1.0)", True),
        ("self.params = list(model.parameters())", "clip_grad_norm_(self.params, 1.0)", True),
        (
            "self.params = (p for p in model.parameters() if p.requires_grad)",
            "clip_grad_norm_(self.params, 1.0)",
            True,
        ),
        ("self.params = trainable(model)", "clip(self.params)", True),
        ("self.params = tuple(filter(bool, model.parameters()))", "clip(params=self.params)", True),
        ("pass", "clip_grad_norm_([p for _, p in self.model.named_parameters()], 1.0)", True),
        (
            "self.params = [*model.parameters()]",
            "every = self.params\n        clip_grad_norm_(every, 1.0)",
            True,
        ),
        ("pass", "clip_grad_norm_(itertools.chain(self.model.parameters(), other.parameters()), 1.0)", True),
        ("pass", "for p in trainable(self.model):\n            p.grad.mul_(0.5)", True),
        (
            "pass",
            "params = list(amp.master_params(self.optimizer))\n        clip_grad_norm_(params, 1.0)",
            False,
        ),
        (
            "pass",
            "clip_grad_norm_([p for g in self.optimizer.param_groups for p in g['params']], 1.0)",
            False,
        ),
        (
            "self.params = list(model.parameters())",
            "clip_grad_norm_(amp.master_params(self.optimizer), 1.0)",
            False,
        ),
        (
            "self.params = list(model.parameters())\n        self.params = list(amp.master_params(optimizer))",
            "clip_grad_norm_(self.params, 1.0)",
            False,
        ),
        ("self.params = [len(p) for p in model.parameters()]", "clip_grad_norm_(self.params, 1.0)", False),
        ("pass", "for p in list(self.model.parameters()):\n            p.grad = None", False),
    ],
)
def test_parameters_of_a_model_are_followed_through_lists_and_names(
    held: str, clip: str, is_found: bool
) -> None:
    """Under O2 these are the fp16 copies by any name; master weights are not."""
    found = set(codes_of(HELD.format(held=held, clip=clip))) & {"AMP104", "AMP117"}
    assert bool(found) == is_found


def test_no_masters_no_copies() -> None:
    """With `master_weights=False` the optimizer has the fp16 parameters themselves."""
    text = O2.format(clip="    clip_grad_norm_(model.parameters(), 1.0)")
    assert "AMP104" in codes_of(text)
    assert 'opt_level="O2"' in text
    assert "AMP104" not in codes_of(text.replace('opt_level="O2"', 'opt_level="O2", master_weights=False'))
    assert "AMP104" in codes_of(text.replace('opt_level="O2"', 'opt_level="O2", master_weights=True'))
