"""The rewrite, one pass a file, in the order in which they run.

``fold`` (computed weights become plain ones), ``normalise`` (spellings of a multiply are recognised),
``decide`` (each weight is judged once), ``install`` (packed weights take the dense ones' places),
``rewrite`` (graph nodes become calls of the operator, which are told by ``between`` whether another
one follows). What one pass learns of a node for the next
stands in ``node.meta[META]``, a :class:`~fxsparse.passes.record.Multiply`.
"""
