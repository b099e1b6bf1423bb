"""Zero-shot classification by name: the image tower of CLIP or SigLIP, and one vector
per class.

Radford et al. 2021 (arXiv:2103.00020), section 3.1.4: a class vector is the normalized
mean of its texts' unit vectors. The logits are the cosine of image and class times the
model's learned scale. SigLIP's bias (arXiv:2303.15343) is left out: it is equal for all
classes and does not change a softmax.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.errors import ModelError, first_sentence
from kd.core.keys import Keys, file_key, keys
from kd.models.answer_table import read_vectors
from kd.models.classifier import Classifier
from kd.models.spec import Spec
from kd.parts.networks._shared import columns, read_names, select_classes
from kd.parts.networks._towers import (
    Tower,
    library,
    load_model,
    preprocessing,
    quiet,
    read_config,
    vision_config,
)

# by model type: the class with both towers, and the class with only the image tower
TOWERS = {
    "clip": ("CLIPModel", "CLIPVisionModelWithProjection"),
    "siglip": ("SiglipModel", "SiglipVisionModel"),
    "clip_vision_model": ("", "CLIPVisionModelWithProjection"),
    "siglip_vision_model": ("", "SiglipVisionModel"),
}


@keys
class Options(Keys):
    """The classes as texts or as vectors."""

    classes: str = file_key("")
    """Text file of the class names, one per line. Empty: the data's names, or those of
    `vectors`.
    """
    prompts: tuple[str, ...] = ("a photo of a {}.",)
    """Texts about a class, with `{}` for its name; their vectors are averaged."""
    vectors: str = file_key("")
    """A .safetensors or .npz file with `vectors` [classes, D] and the class names,
    instead of a text tower.
    """
    scale: NonNegativeFloat = 0.0
    """Factor of the cosine. 0: the learned scale. Required with `vectors` if the folder
    has only one tower.
    """

    def __post_init__(self) -> None:
        if not self.prompts or not all(
            prompt.count("{}") == 1 for prompt in self.prompts
        ):
            raise ValueError(
                f"prompts are {list(self.prompts)}; each has one {{}} for the name of"
                " the class"
            )


class Nearest(nn.Module):
    """The scaled cosine between an image and each class."""

    def __init__(self, tower: Tower, vectors_CD: Tensor, scale: float) -> None:
        super().__init__()
        self.tower = tower
        self.scale = scale
        self.register_buffer("vectors", vectors_CD.float())

    def forward(self, pixels: Tensor) -> Tensor:
        image_BD = F.normalize(self.tower(pixels), dim=1)
        return self.scale * image_BD @ self.vectors.T.to(image_BD.dtype)  # type: ignore[operator]


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> Classifier:
    """Load the image tower, and compute or read the class vectors."""
    hub = library(spec.config_path)
    config = read_config(spec, hub)
    if config.model_type not in TOWERS:
        wrong = f"'{spec.model}' is a {config.model_type}"
        allowed = f"One of: {', '.join(TOWERS)}"
        remedy = "Choose a model with texts"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)
    if features or not spec.logits:
        wrong = "is zero_shot, which returns logits"
        remedy = "Set teacher.kind=transformers for its features"
        raise ModelError(f"{spec.config_path}.kind", wrong, "Losses on logits", remedy)
    # a class's score is meaningful only relative to the others
    spec.require_meaning("single_label_classification")
    arguments, preparation = preprocessing(spec, hub, config, image_size)
    names = list(spec.classes or [])
    if options.classes:
        names = read_names(options.classes, f"{spec.config_path}.classes")
    both_towers, image_tower = TOWERS[config.model_type]
    if not options.vectors:
        _require_texts(spec, both_towers, names)
        model = load_model(spec, hub, both_towers, config)
        vectors_CD = text_vectors(spec, hub, model, names, options.prompts)
    else:
        names, vectors_CD = file_vectors(spec, options.vectors, names)
        # the learned scale is stored beside the towers
        if both_towers and not options.scale:
            model = load_model(spec, hub, both_towers, config)
        else:
            model = load_model(spec, hub, image_tower, vision_config(config))
    scale = options.scale or _learned_scale(spec, model)
    if hasattr(model, "text_model"):
        # it is not needed after the class vectors are computed
        model.text_model = None  # type: ignore[assignment]
    size = arguments["input_size"]
    with torch.no_grad():
        width = Tower(model)(torch.zeros(1, 3, size, size)).shape[1]
    if vectors_CD.shape[1] != width:
        wrong = (
            f"holds vectors of {vectors_CD.shape[1]} numbers, but the image tower's"
            f" have {width}"
        )
        allowed = "Vectors from the text tower of the same model"
        raise ModelError(f"{spec.config_path}.vectors", wrong, allowed, "")
    classes, pick = select_classes(spec, len(vectors_CD), names, "")
    for rows in columns(pick).values():
        vectors_CD = vectors_CD[rows]
    tower = Tower(model, preparation.order)
    teacher = Classifier(
        Nearest(tower, F.normalize(vectors_CD.float(), dim=1), scale),
        num_classes=len(classes),
        classes=classes,
        architecture={"zero_shot": type(config).__name__, "scale": scale},
        **arguments,
    )
    teacher.preprocessing = preparation.preprocessing
    return teacher


def _require_texts(spec: Spec, both_towers: str, names: Sequence[str]) -> None:
    """Require a text tower, and class names to write texts about."""
    if not both_towers:
        wrong = f"'{spec.model}' has no text tower"
        allowed = "A model with both towers, or vectors"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, "Set vectors")
    if not names:
        wrong = "is missing: neither the data nor the model names classes"
        allowed = "A text file, one class a line"
        raise ModelError(f"{spec.config_path}.classes", wrong, allowed, "Add it")


def file_vectors(
    spec: Spec, path: str, classes: Sequence[str]
) -> tuple[Sequence[str], Tensor]:
    """Return class names and their vectors [C, D], matched by name if it has names."""
    config_path = f"{spec.config_path}.vectors"
    names, vectors_CD = read_vectors(path, config_path)
    position = {name: i for i, name in enumerate(names)}
    missing = [name for name in classes if name not in position] if names else []
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if missing or repeated:
        count = "no vector" if missing else "two vectors"
        wrong = f"'{path}' has {count} of the class '{[*missing, *repeated][0]}'"
        allowed = f"It names {', '.join(names[:5])}"
        raise ModelError(config_path, wrong, allowed, "One vector for each class")
    if names and classes:
        vectors_CD = vectors_CD[[position[name] for name in classes]]
    zeros = (vectors_CD == 0).all(1).nonzero()[:, 0].tolist()
    if zeros:
        wrong = f"'{path}' has zeros as the vector of class {zeros[0]}"
        allowed = "A direction for each class"
        raise ModelError(config_path, wrong, allowed, "Write it anew")
    return classes or names, vectors_CD


@torch.no_grad()
def text_vectors(
    spec: Spec, hub: Any, model: Any, names: Sequence[str], prompts: Sequence[str]
) -> Tensor:
    """Return one unit vector per class [C, D]: the normalized mean over the prompts."""
    try:
        with quiet(hub):
            tokenizer = hub.AutoTokenizer.from_pretrained(spec.model)
    # transformers raises many types, all caused by the folder
    except Exception as error:
        wrong = (
            f"'{spec.model}' has no tokenizer that can be loaded"
            f" ({first_sentence(error, 150)})"
        )
        allowed = "Its tokenizer beside the model, or a file of vectors"
        remedy = f"Add it to the folder, or set {spec.config_path}.vectors"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy) from error
    text_config = model.config.text_config
    _require_words(spec, tokenizer, names, text_config.vocab_size)
    keys = ["input_ids", "attention_mask"]
    padding: dict[str, Any] = {
        "padding": True,
        "max_length": text_config.max_position_embeddings,
    }
    if "siglip" in model.config.model_type:  # trained on padded texts
        keys = ["input_ids"]
        padding["padding"] = "max_length"
    class_vectors = []
    for name in names:
        texts = [prompt.replace("{}", name) for prompt in prompts]
        tokens = tokenizer(texts, return_tensors="pt", truncation=True, **padding)
        inputs = {key: tokens[key] for key in keys if key in tokens}
        vectors_PD = model.get_text_features(**inputs)
        if not isinstance(vectors_PD, Tensor):
            vectors_PD = vectors_PD.pooler_output
        mean_D = F.normalize(vectors_PD, dim=1).mean(0)
        class_vectors.append(F.normalize(mean_D, dim=0))
    return torch.stack(class_vectors)


def _require_words(spec: Spec, tokenizer: Any, names: Sequence[str], size: int) -> None:
    """Require that the tokenizer distinguishes the classes.

    Without its files transformers may create an empty one.
    """
    name_by_ids: dict[tuple[int, ...], str] = {}
    for name in names:
        ids = tuple(tokenizer(name, add_special_tokens=False)["input_ids"])
        is_known = any(id != tokenizer.unk_token_id for id in ids)
        same = name_by_ids.setdefault(ids, name)
        if not is_known or max(ids) >= size or same != name:
            wrong = f"the tokenizer of '{spec.model}' does not know the class '{name}'"
            if same != name:
                wrong += f" from '{same}'"
            allowed = "The tokenizer that the model was trained with"
            remedy = (
                f"Add its tokenizer to the folder, or set {spec.config_path}.vectors"
            )
            raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)


def _learned_scale(spec: Spec, model: Any) -> float:
    if not hasattr(model, "logit_scale"):
        wrong = (
            f"is missing: '{spec.model}' has an image tower alone, which has learned"
            " none"
        )
        allowed = "A number above 0; CLIP's is 100"
        raise ModelError(f"{spec.config_path}.scale", wrong, allowed, "Set it")
    return float(model.logit_scale.detach().exp())
