"""install(): checks before it changes anything, changes once, and says what does not fit."""

import importlib.metadata
import inspect

import pytest

from te_plugin.maxtext import seams as module
from te_plugin.maxtext.seams import SEAMS, Seam, SeamError, install


def attributes():
    found = []
    for seam in SEAMS:
        holder, name = seam.holder()
        found.append(getattr(holder, name))
    return found


def test_installing_twice_changes_nothing_more():
    install()
    first = attributes()
    install()
    assert attributes() == first
    assert module.is_installed()


def test_wrappers_keep_name_and_signature():
    install()
    for seam, function in zip(SEAMS, attributes(), strict=True):
        assert function.__name__ == seam.path.split(".")[-1]
        assert set(seam.needs) <= set(inspect.signature(function).parameters)


@pytest.mark.report("AI-Hypercomputer/maxtext#3589")
@pytest.mark.parametrize("version", ["0.2.4", "0.3.0", "1.0"])
def test_another_version_is_refused_with_the_range_that_works(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(SeamError, match=rf"maxtext {version} .* 0\.2\.5 up to \(not including\) 0\.3\.0"):
        install()


def seam_of(function, monkeypatch, needs):
    """A seam whose function is `function`."""
    holder = type("Holder", (), {"target": staticmethod(function)})
    monkeypatch.setattr(Seam, "holder", lambda self: (holder, "target"))
    seam = Seam("maxtext.somewhere", "target", needs, "te_plugin.maxtext.experts:wrap_gmm")
    monkeypatch.setattr(module, "SEAMS", (seam,))
    return holder


@pytest.mark.report("AI-Hypercomputer/maxtext#3589")
def test_a_parameter_that_became_required_is_named_and_nothing_is_changed(monkeypatch):
    """A keyword that a later release demands would be a missing-argument TypeError in the first step of every packed run."""
    def later(query, key, *, layout):
        return query, key, layout

    holder = seam_of(later, monkeypatch, ("query", "key"))
    with pytest.raises(SeamError, match="layout new.*nothing was changed"):
        install()
    assert holder.target is later


def test_a_parameter_that_is_gone_is_named(monkeypatch):
    seam_of(lambda query: query, monkeypatch, ("query", "sinks"))
    with pytest.raises(SeamError, match="sinks gone"):
        install()


def test_a_function_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(module, "SEAMS", (Seam("maxtext.layers.quantizations", "no_such_function", (), "x:y"),))
    with pytest.raises(SeamError, match="maxtext.layers.quantizations.no_such_function does not exist"):
        install()


def test_a_wrapper_that_cannot_be_made_changes_nothing(monkeypatch):
    """The first seams stayed wrapped where a later one's module could not be imported."""
    holder = seam_of(lambda query: query, monkeypatch, ("query",))
    original = holder.target
    broken = Seam("maxtext.somewhere", "target", ("query",), "te_plugin.no_module:x")
    monkeypatch.setattr(module, "SEAMS", (*module.SEAMS, broken))
    with pytest.raises(ModuleNotFoundError, match="te_plugin.no_module"):
        install()
    assert holder.target is original
