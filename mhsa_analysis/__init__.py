"""What the heads of a trained layer do: statistics over calls, a layer without some of its heads, a page.

Its public names are those of `mhsa_compile.analysis`.
"""
