"""AttAnchor: copies of tokens next to the tokens of the other modality that they resemble."""

from crossfuse.fusions.anchors.image_anchors import ImageAnchors
from crossfuse.fusions.anchors.order import image_into_text, text_into_image
from crossfuse.fusions.anchors.text_anchors import TextAnchors

__all__ = ["ImageAnchors", "TextAnchors", "image_into_text", "text_into_image"]
