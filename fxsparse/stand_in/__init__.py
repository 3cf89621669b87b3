"""The stand-in of a packed weight: a tensor without storage (``weight_view``), what functions
(``functions``) and operators (``products``) of torch do with it, and with views of it (``views``)."""
