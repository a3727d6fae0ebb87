"""The pages: what an address asks for, and how runs, charts and tables are drawn as Dash components.

Whatever comes out of a store is a child of a component, so the browser takes it as text and never as markup.
"""
