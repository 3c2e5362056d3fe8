"""Our mechanisms beside those of other packages, on the same numbers.

Nothing here is needed by the project: each comparison is skipped where its package is missing. One file for each
package holds the comparisons; `recipes/quality_assurance/marked_tests.py` runs the same ones and keeps the outcome.
"""
