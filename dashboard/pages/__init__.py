"""The pages as Dash components. Text from a store is always a component's child, so browsers never see it as markup."""
