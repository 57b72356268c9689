"""From overrides to a Config: groups, recipes, misspelt keys, and who wins."""

import re
import shutil

import pytest

from te_plugin import paths
from te_plugin.config import ConfigError, compose
from te_plugin.config.composition import groups
from te_plugin.config.loading import read_yaml

TINY = "recipe=llama_tiny"


def tiny(*overrides: str):
    return compose([TINY, *overrides], for_run=False)


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_every_recipe_composes_and_carries_its_name(recipe):
    assert compose([f"recipe={recipe}"], for_run=False).recipe == recipe


@pytest.mark.report("hydra-ecosystem/hydra#1912")
@pytest.mark.parametrize("override,nearest", [
    ("model.head_dmi=3", "model.head_dim"), ("+model.head_dmi=3", "model.head_dim"), ("++model.head_dmi=3", "model.head_dim"),
    ("modle.head_dim=3", "model.head_dim"), ("+modle.head_dim=3", "model.head_dim"), ("optim.betta1=0.9", "optim.beta1"),
    ("lr=1e-5", "optim.lr"), ("data.lr=1e-5", "optim.lr"), ("model.rope_scaling.facter=8", "model.rope_scaling.factor"),
])
def test_a_misspelt_key_is_refused_with_the_nearest_one_also_with_plus(override, nearest):
    with pytest.raises(ConfigError) as caught:
        tiny(override)
    assert f"the nearest is '{nearest}'" in str(caught.value)


def test_a_misspelt_group_names_the_group():
    with pytest.raises(ConfigError, match="no key 'precison'; the nearest group is 'precision'"):
        tiny("precison=bf16")
    with pytest.raises(ConfigError, match="precision=fp8 does not exist.*fp8_current"):
        tiny("precision=fp8")


def test_a_choice_without_its_group_names_the_group():
    with pytest.raises(ConfigError, match="'thd' is no key but a choice of the group layout; write layout=NAME"):
        tiny("thd=off")


@pytest.mark.parametrize("group", sorted(groups()))
@pytest.mark.parametrize("value", ["", "null", "''"])
def test_an_empty_group_is_refused(group, value):
    overrides = [f"{group}={value}"] if group == "recipe" else [TINY, f"{group}={value}"]
    with pytest.raises(ConfigError, match=f"{group} cannot be empty; choose one of"):
        compose(overrides, for_run=False)


def test_a_recipe_is_needed():
    with pytest.raises(ConfigError, match="no recipe is chosen; add recipe=NAME, one of: .*llama_tiny"):
        compose([])


@pytest.mark.parametrize("override,message", [
    ("model", "has no value"), ("llama_moe_tiny", "write recipe=llama_moe_tiny"),
    ("~data.path", "would delete a key"), ("~model", "would delete a key"), ("=3", "not understood"),
    ("optim={lr: 1}", "does not exist"), ("model.rope_scaling=null", "sets a whole section"),
    ("layout.name=bshd", "belongs to the group file; choose one with layout=bshd"),
    ("hydra.run.dir=x", "no key 'hydra.run.dir'"), ("precision=bf16,fp8_current", "does not exist"),
])
def test_other_forms_are_refused_with_the_form_to_use(override, message):
    with pytest.raises(ConfigError) as caught:
        tiny(override)
    assert message in str(caught.value)


def test_a_group_chosen_twice_is_refused():
    with pytest.raises(ConfigError, match="layout is chosen twice: thd and bshd"):
        tiny("layout=thd", "layout=bshd")


def test_values_on_the_command_line_win_over_the_recipe():
    assert tiny().optim.lr != 1e-5
    assert tiny("optim.lr=1e-5").optim.lr == 1e-5
    assert tiny("+optim.lr=1e-5").optim.lr == 1e-5


def test_of_two_values_the_last_one_wins():
    assert tiny("optim.lr=1e-5", "optim.lr=2e-5").optim.lr == 2e-5


@pytest.mark.parametrize("group,choice", [(g, c) for g, choices in groups().items() if g != "recipe" for c in choices])
def test_a_group_chosen_on_the_command_line_wins_over_the_recipe_with_all_its_values(group, choice):
    """Also where the recipe sets values of that group itself."""
    text = (paths.configs_dir() / group / f"{choice}.yaml").read_text()
    values = read_yaml(text, choice)
    section = values[group] if "@package _global_" in text else values
    for recipe in ("llama_tiny", "llama3_1_8b"):
        try:
            cfg = compose([f"recipe={recipe}", f"{group}={choice}"], for_run=False)
        except ConfigError as error:  # refused for what it asks, not overruled by the recipe
            assert "there is no key" not in str(error) and "is not set" not in str(error)
            continue
        for key, value in section.items():
            if not isinstance(value, dict):
                assert getattr(getattr(cfg, group), key) == value, key


def test_group_files_mean_the_same_to_hydra_and_to_the_strict_reader():
    """No `on`, `off` or date hides in a YAML file, and every file is .yaml."""
    from omegaconf import OmegaConf

    for path in paths.configs_dir().rglob("*"):
        if path.is_file():
            assert path.suffix == ".yaml", path
            assert OmegaConf.to_container(OmegaConf.load(path)) == read_yaml(path.read_text(), str(path)), path
            assert "_target_" not in path.read_text(), path


def test_composition_does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    before = tiny()
    monkeypatch.chdir(tmp_path)
    assert tiny() == before


# ---- the user's own folder ----

@pytest.fixture
def own(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "model").mkdir()
    tiny_recipe = (paths.configs_dir() / "recipe/llama_tiny.yaml").read_text()
    (tmp_path / "recipe/mine.yaml").write_text(
        tiny_recipe.replace("recipe: llama_tiny", "recipe: mine").replace("/model: llama_tiny", "/model: wide"))
    tiny_model = (paths.configs_dir() / "model/llama_tiny.yaml").read_text()
    (tmp_path / "model/wide.yaml").write_text(
        tiny_model.replace("name: llama_tiny", "name: wide").replace("ffn_hidden_size: 768", "ffn_hidden_size: 1024"))
    return tmp_path


def test_recipes_and_groups_of_the_users_own_folder_compose(own):
    cfg = compose(["recipe=mine", "layout=bshd"], for_run=False, config_dir=own)
    assert (cfg.recipe, cfg.model.name, cfg.model.ffn_hidden_size, cfg.layout.name) == ("mine", "wide", 1024, "bshd")
    assert compose([TINY, "model=wide"], for_run=False, config_dir=own).model.ffn_hidden_size == 1024
    with pytest.raises(ConfigError, match="recipe=mine does not exist"):
        compose(["recipe=mine"], for_run=False)


def test_a_misspelt_key_in_the_users_own_file_is_refused(own):
    (own / "model/wide.yaml").write_text((own / "model/wide.yaml").read_text().replace("num_layers", "num_layer"))
    with pytest.raises(ConfigError, match="no key 'model.num_layer'; the nearest is 'model.num_layers'"):
        compose([TINY, "model=wide"], for_run=False, config_dir=own)


def test_the_users_own_folder_hides_no_file_of_the_package_and_is_never_ignored(own, tmp_path):
    (own / "model/llama_tiny.yaml").write_text("name: other")
    with pytest.raises(ConfigError, match="model=llama_tiny is a file of the package already"):
        compose([TINY], for_run=False, config_dir=own)
    with pytest.raises(ConfigError, match="no such folder"):
        compose([TINY], for_run=False, config_dir=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file of a group"):
        compose([TINY], for_run=False, config_dir=tmp_path / "empty")


@pytest.mark.report("yaml/pyyaml#272")
@pytest.mark.parametrize("written, message", [
    ("run:\n  seed: 12:30", "run.seed takes a whole number, not 12:30"),
    ("run:\n  resume: off", "run.resume takes true or false, not off"),
    ("run:\n  threads: 1_0", "run.threads takes a whole number or null, not 1_0"),
    ("track:\n  run_name: true", "track.run_name takes a text or null, not True; put it in quotes"),
    ("run:\n  dir: ${oc.env:HOME}/x", "run.dir holds an interpolation"),
])  # fmt: skip
def test_a_file_of_the_users_own_is_read_as_strictly_as_the_command_line(own, written, message):
    """Hydra's reader knows YAML 1.1, in which 12:30 is 750 and off is false."""
    path = own / "recipe/mine.yaml"
    path.write_text(path.read_text() + written + "\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(["recipe=mine"], for_run=False, config_dir=own)


@pytest.mark.report("yaml/pyyaml#272")
def test_a_group_that_a_recipe_chooses_is_read_as_strictly(own):
    path = own / "model/wide.yaml"
    path.write_text(re.sub(r"num_layers: .*", "num_layers: 1:00", path.read_text()))
    with pytest.raises(ConfigError, match="model.num_layers takes a whole number, not 1:00"):
        compose(["recipe=mine"], for_run=False, config_dir=own)


def test_a_name_that_looks_like_a_number_stays_the_text_that_was_written(own):
    path = own / "recipe/mine.yaml"
    path.write_text(path.read_text() + "track:\n  run_name: 1E234\n  project: 007\n")
    track = compose(["recipe=mine"], for_run=False, config_dir=own).track
    assert (track.run_name, track.project) == ("1E234", "007")


def test_a_recipe_may_build_on_another(own):
    (own / "recipe/next.yaml").write_text(
        "# @package _global_\ndefaults:\n  - mine\n  - _self_\nrecipe: next\noptim:\n  lr: 3e-3\n")
    mine, following = (compose([f"recipe={name}"], for_run=False, config_dir=own) for name in ("mine", "next"))
    assert following.optim.lr == 3e-3 and following.data == mine.data and following.schedule == mine.schedule


@pytest.mark.report("yaml/pyyaml#272")
def test_a_recipe_that_another_builds_on_is_read_as_strictly(own):
    (own / "recipe/next.yaml").write_text("# @package _global_\ndefaults:\n  - mine\n  - _self_\nrecipe: next\n")
    path = own / "recipe/mine.yaml"
    path.write_text(path.read_text() + "run:\n  seed: 12:30\n")
    with pytest.raises(ConfigError, match="run.seed takes a whole number, not 12:30"):
        compose(["recipe=next"], for_run=False, config_dir=own)


@pytest.mark.parametrize("name", ["it's", "a 'b' c", "back\\slash", "slash'\\", "a,b", "a=b", "${x}", "ünï", "#1"])
def test_a_folder_of_any_name_is_searched(own, name):
    folder = own / "below" / name
    shutil.copytree(own / "model", folder / "model")
    shutil.copytree(own / "recipe", folder / "recipe")
    assert compose(["recipe=mine"], for_run=False, config_dir=folder).model.name == "wide"


@pytest.mark.parametrize("name", ["123", "1e5", "true", "a,b", "a b", "a.b", "it's"])
def test_a_recipe_of_any_name_is_found(own, name):
    (own / "recipe/mine.yaml").rename(own / f"recipe/{name}.yaml")
    assert compose([f"recipe={name}"], for_run=False, config_dir=own).model.name == "wide"


@pytest.mark.parametrize("written, message", [
    (b"hydra:\n  run:\n    dir: x\n", "there is no key 'hydra'"),
    (b"# caf\xe9\n", "mine.yaml: cannot be read as a configuration: 'utf-8' codec"),
])  # fmt: skip
def test_what_nothing_reads_in_a_recipe_is_refused(own, written, message):
    path = own / "recipe/mine.yaml"
    path.write_bytes(path.read_bytes() + written)
    with pytest.raises(ConfigError, match=message):
        compose(["recipe=mine"], for_run=False, config_dir=own)


def test_the_name_of_a_recipe_leads_to_no_other_folder(own):
    path = own / "recipe/mine.yaml"
    path.write_text(path.read_text().replace("recipe: mine", "recipe: ../mine"))
    with pytest.raises(ConfigError, match="recipe: ../mine: the name is part of folder names"):
        compose(["recipe=mine"], for_run=False, config_dir=own)


@pytest.mark.parametrize("text, message", [
    ("\ufeff# @package _global_\nrecipe: mine\n", "begins with a byte order mark"),
    ("a: [", "no valid YAML"), ("", "holds no keys"), ("recipe: mine\n", "@package _global_"),
    ("# @package _global_\noptim:\n  lr: 1\noptim:\n  eps: 1\n", "'optim' is given twice"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_read_is_one_clear_error(own, text, message):
    (own / "recipe/mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose(["recipe=mine"], for_run=False, config_dir=own)
