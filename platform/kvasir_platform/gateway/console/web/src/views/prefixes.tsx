// What cached prompts share: the longest common beginnings, and who holds them.

import { Bar, Empty, Section } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { count } from "../lib/format";
import { useFeed } from "../lib/feed";
import type { PrefixSurvey } from "../lib/types";

interface Row {
  number: number;
  tokens: number;
  prompts: number;
  saved: number;
  workers: string[];
}

export function Prefixes() {
  const { data, error } = useFeed<{ models: PrefixSurvey[] }>("console/prefixes", undefined, undefined, 10_000);
  if (data === null) return error === null ? <Empty title="Reading the prefix index …" /> : <Empty title="The prefix index cannot be read.">{error.message}</Empty>;
  return (
    <>
      {data.models.map((each) => (
        <Model key={each.model} survey={each} />
      ))}
    </>
  );
}

function Model({ survey }: { survey: PrefixSurvey }) {
  const rows = survey.prefixes.map(({ blocks, prompts, workers }, i): Row => {
    const tokens = blocks * survey.block_tokens;
    return { number: i + 1, tokens, prompts, saved: tokens * (prompts - 1), workers };
  });
  const most = Math.max(...rows.map((each) => each.saved), 1);
  return (
    <Section
      title={survey.model}
      aside={<span class="quiet">{`of ${count(survey.blocks)} cached blocks of ${survey.block_tokens} tokens${survey.complete ? "" : ", a sample: the index holds more"}`}</span>}
    >
      {rows.length === 0 ? (
        <Empty title="No two cached prompts begin alike and then differ.">
          Prefixes appear here as prompts with a common beginning, such as a system message, are cached.
        </Empty>
      ) : (
        <Table rows={rows} columns={columns(most)} keyOf={(each) => String(each.number)} label={`Prefixes of ${survey.model}`} />
      )}
    </Section>
  );
}

function columns(most: number): Column<Row>[] {
  return [
    { name: "prefix", number: true, title: "numbered by the tokens that sharing saves; its content is not kept", value: (each) => each.number },
    { name: "tokens", number: true, title: "length of the common beginning", value: (each) => each.tokens, show: (each) => count(each.tokens) },
    { name: "prompts", number: true, title: "cached prompts that begin with it and differ afterwards", value: (each) => each.prompts, show: (each) => count(each.prompts) },
    {
      name: "tokens saved",
      title: "tokens that these prompts would have computed again without it",
      value: (each) => each.saved,
      show: (each) => <Bar value={each.saved / most} label={count(each.saved)} tone="good" />,
    },
    { name: "held by", number: true, value: (each) => each.workers.length, show: (each) => `${each.workers.length} ${each.workers.length === 1 ? "worker" : "workers"}` },
    { name: "workers", value: (each) => each.workers.join(", "), show: (each) => <span class="reason wide">{each.workers.join(", ")}</span> },
  ];
}
