"""embedfarm turns a corpus into vectors on every device you have.

The rooms of this package lie beside it in the source tree, which so shows the data's path; they are
links here (`embedfarm/producer -> ../producer`), and files in what is installed.
"""
