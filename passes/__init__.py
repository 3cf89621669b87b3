"""The rewrite, one pass a file, in the order in which they run.

``fold`` (computed weights become plain ones), ``normalise`` (spellings of a multiply are recognised),
``decide`` (each weight is judged once), ``install`` (packed weights take the dense ones' places),
``rewrite`` (graph nodes become calls of the operator). ``schedule`` has what follows that: ``no_ops``
takes out what does nothing, ``chain``, ``epilogue`` and ``siblings`` join calls, ``follow`` tells each
whether another one comes next; ``unfuse`` is the way back. What one pass learns of a node for the next
stands in ``node.meta[META]``, a :class:`~fxsparse.passes.record.Multiply`.
"""
